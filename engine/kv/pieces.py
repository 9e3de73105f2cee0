"""Pieces of a state that lie in pages and in runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from lazyio.engine.kv.pool import PAGE
from lazyio.engine.kv.tables import Table
from lazyio.engine.state import Growing, Recurrent, Sliding
from lazyio.kernels.contract import usable
from lazyio.kernels.pages import Pages, write


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
    def put_each(kinds: Sequence[Sequence[Paged]], new: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """See `Growing`. Where there are kernels, all kinds take one launch, and pages are looked up on the device."""
        if usable(positions.device):
            count = positions.shape[0] // len(kinds[0])
            write(new, [[piece._grown(count) for piece in pieces] for pieces in kinds], positions)
            return
        for pieces, entries in zip(kinds, new, strict=True):
            for piece, own in zip(pieces, entries.chunk(len(pieces)), strict=True):
                piece._put(own)

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Add the entries [n, *shape] of the next tokens; return those of all tokens, a copy."""
        self._put(new)
        return self.entries

    @property
    def entries(self) -> torch.Tensor:
        """Those of all tokens so far, a copy."""
        return self.lie.gathered()

    @property
    def lie(self) -> Pages:
        """The same for a kernel, which takes them where they lie."""
        return Pages(self.plane, self.table.device, self._length)

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

    def _grown(self, count: int) -> Pages:
        """Those of so many tokens more, of which nothing is written yet."""
        self._length += count
        assert self._length <= len(self.table.host.pages) * self.plane.shape[1], "a sequence outgrew its claim"
        return self.lie

    def _put(self, new: torch.Tensor) -> None:
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
