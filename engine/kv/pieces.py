"""Pieces of a state that lie in pages and in runs."""

from __future__ import annotations

from typing import Self

import torch

from lazyio.engine.kv.pool import PAGE
from lazyio.engine.kv.tables import Table
from lazyio.engine.state import Growing, Recurrent, Sliding


class Paged:
    """Entries of all tokens so far, in pages: takes the place of `Growing`.

    `plane` [pages, entries a page, *shape] is that of the whole pool, `table` int64 [pages of the sequence] the same
    as the host's on the device.
    """

    def __init__(self, plane: torch.Tensor, host_table: Table, table: torch.Tensor, length: int) -> None:
        self.plane, self.table, self._host_table, self._length = plane, table, host_table, length

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Add the entries [n, *shape] of the next tokens; return those of all tokens, a copy."""
        each, done = self.plane.shape[1], 0
        assert self._length + len(new) <= self._host_table.capacity // (PAGE // each), "a sequence outgrew its claim"
        while done < len(new):
            number, start = divmod(self._length, each)
            in_a_row = 1 if start else self._host_table.in_a_row(number, (len(new) - done) // each)
            first = int(self._host_table.pages[number])
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
        pages = -(-self._length // self.plane.shape[1])
        return self.plane.index_select(0, self.table[:pages]).flatten(0, 1)[: self._length]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return len(self._host_table.pages) * self.plane[0].nbytes

    def clone(self) -> Growing:
        """A copy in memory of its own."""
        entries = self.entries
        room = len(self._host_table.pages) * self.plane.shape[1]
        copy = Growing(room, *entries.shape[1:], dtype=entries.dtype, device=entries.device)
        copy.append(entries)
        return copy


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
