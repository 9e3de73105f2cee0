"""Pieces of a state that lie in pages and in runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Self

import torch

from lazyio.engine.kv.pool import PAGE
from lazyio.engine.kv.tables import Table
from lazyio.engine.state import Growing, Recurrent, Sliding


@dataclass(eq=False, frozen=True, slots=True)
class LaneTable:
    """The pages of a sequence, on the host and on the device, int64 [pages], where they are sent once."""

    host: Table
    device: torch.Tensor


class Paged:
    """Entries of all tokens so far, in pages: takes the place of `Growing`.

    `plane` [pages, entries a page, *shape] is that of the whole pool.
    """

    def __init__(self, plane: torch.Tensor, table: LaneTable, length: int) -> None:
        self.plane, self.table, self._length = plane, table, length

    @staticmethod
    def append_together(pieces: Sequence[Paged], new: torch.Tensor) -> list[torch.Tensor]:
        """`append` for several sequences of one layer, one entry of each: new [sequences, *shape]."""
        plane = pieces[0].plane
        assert all(piece.plane is plane for piece in pieces), "pieces are of different layers"
        torch._foreach_copy_([piece._next() for piece in pieces], list(new.unbind()))
        for piece in pieces:
            piece._length += 1
        counts = tuple([piece._pages for piece in pieces])
        found = plane.index_select(0, _joined(tuple([piece.table for piece in pieces]), counts)).flatten(0, 1)
        starts = accumulate((count * plane.shape[1] for count in counts), initial=0)
        return [found[start : start + piece._length] for start, piece in zip(starts, pieces, strict=False)]

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Add the entries [n, *shape] of the next tokens; return those of all tokens, a copy."""
        each, done = self.plane.shape[1], 0
        pages = self.table.host
        assert self._length + len(new) <= pages.capacity // (PAGE // each), "a sequence outgrew its claim"
        while done < len(new):
            number, start = divmod(self._length, each)
            in_a_row = 1 if start else pages.in_a_row(number, (len(new) - done) // each)
            first = int(pages.pages[number])
            if in_a_row > 1:  # whole pages at once
                count = in_a_row * each
                self.plane[first : first + in_a_row] = new[done : done + count].reshape(in_a_row, each, *new.shape[1:])
            else:
                count = min(each - start, len(new) - done)
                self.plane[first, start : start + count] = new[done : done + count]
            self._length += count
            done += count
        return self.entries

    @property
    def entries(self) -> torch.Tensor:
        """Those of all tokens so far, a copy."""
        return self.plane.index_select(0, self.table.device[: self._pages]).flatten(0, 1)[: self._length]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return len(self.table.host.pages) * self.plane[0].nbytes

    def clone(self) -> Growing:
        """A copy in memory of its own."""
        entries = self.entries
        room = len(self.table.host.pages) * self.plane.shape[1]
        copy = Growing(room, *entries.shape[1:], dtype=entries.dtype, device=entries.device)
        copy.append(entries)
        return copy

    @property
    def _pages(self) -> int:
        """Pages with entries."""
        return -(-self._length // self.plane.shape[1])

    def _next(self) -> torch.Tensor:
        """Where the next entry lies."""
        number, start = divmod(self._length, self.plane.shape[1])
        assert number < len(self.table.host.pages), "a sequence outgrew its claim"
        return self.plane[int(self.table.host.pages[number]), start]


# Lanes get another page only once in so many steps.
@lru_cache(maxsize=64)
def _joined(tables: tuple[LaneTable, ...], counts: tuple[int, ...]) -> torch.Tensor:
    """The first pages of several tables behind each other, on the device."""
    return torch.cat([table.device[:count] for table, count in zip(tables, counts, strict=True)])


class Window(Sliding):
    """Entries of the last tokens, as many as attention with a window reaches back to, and no room for more."""

    def __init__(self, entries: torch.Tensor, length: int) -> None:
        self._reach = len(entries)
        self._entries, self._length = entries, length

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """See `Sliding`."""
        joined = torch.cat([self._entries[: self._length], new])
        self._keep(joined[max(0, len(joined) - self._reach) :])
        return joined


class Placed(Recurrent):
    """A tensor that each ubatch replaces, where it is."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    @property
    def value(self) -> torch.Tensor:
        """What is there."""
        return self._value

    @value.setter
    def value(self, new: torch.Tensor) -> None:
        self._value.copy_(new)

    def clone(self) -> Self:
        """A copy that shares nothing."""
        return type(self)(self._value.clone())
