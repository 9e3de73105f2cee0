"""Proof of what was gathered: some rows of every gather, read once more in the plainest way, and compared."""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from lazyio.errors import ReadError
from lazyio.fetchers.base import Bytes, Extent, Int64
from lazyio.fetchers.files import FileSet
from lazyio.gate import TableStats
from lazyio.rows import Rows
from lazyio.staged import Finish

# A row in the place of another is mostly one that lies near it.
_NEIGHBOURS = (1, -1)

# A row's place in the gather, its id, the number of its extent, its offset in the file.
_Chosen = tuple[int, int, int, int]


class VerifiedRows:
    """Rows of another way into memory, of which `count` of every gather, chosen at random, are verified.

    They are read with a call each through the page cache, from descriptors of their own, and their places are worked
    out anew: nothing is shared with what is verified but the extents.
    """

    def __init__(self, rows: Rows, extents: Sequence[Extent], row_bytes: int, count: int) -> None:
        self._inner = rows
        self._extents = extents
        self._row_bytes = row_bytes
        self._count = count
        self._firsts = [extent.first_row for extent in extents]
        self._files = FileSet(extent.path for extent in extents)
        for descriptor in self._files.descriptors:
            # The rows are scattered: what readahead would bring beside them is of no use.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._descriptors = [self._files.descriptors[self._files.index[extent.path]] for extent in extents]
        self._shifts = [extent.offset - extent.first_row * row_bytes for extent in extents]
        self._random = random.Random().random

    def gather(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Fill and verify; `Rows` has the contract. Raises ReadError for a row that differs."""
        chosen = self._choose(asked)
        self._inner.gather(asked, rows, stats)
        self._verify(chosen, rows)

    def read(self, unique: Int64, rows: Bytes, stats: TableStats) -> None:
        """Fill and verify; `Rows` has the contract. Raises ReadError for a row that differs."""
        chosen = self._choose(unique)
        self._inner.read(unique, rows, stats)
        self._verify(chosen, rows)

    def start(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        """Begin, and verify at the end; `Rows` has the contract. What is returned raises ReadError for a difference."""
        chosen = self._choose(asked)
        gather = self._inner.start(asked, stats)

        def finish(rows: Bytes, stats: TableStats) -> None:
            gather(rows, stats)
            self._verify(chosen, rows)

        return finish

    def close(self) -> None:
        """Close the descriptors, and the way that is verified."""
        self._files.close()
        self._inner.close()

    def _choose(self, asked: NDArray[Any]) -> list[_Chosen]:
        """Choose rows of a gather that is about to begin, and have the kernel bring them while it goes on."""
        size, chosen = asked.size, list[_Chosen]()
        for _ in range(min(self._count, size)):
            place = int(self._random() * size)
            row = asked.item(place)
            extent, offset = self._place(row)
            os.posix_fadvise(self._descriptors[extent], offset, self._row_bytes, os.POSIX_FADV_WILLNEED)
            chosen.append((place, row, extent, offset))
        return chosen

    def _verify(self, chosen: list[_Chosen], rows: Bytes) -> None:
        if not chosen:
            return
        row_bytes, data = self._row_bytes, rows.data.cast("B")
        for place, row, extent, offset in chosen:
            stored = os.pread(self._descriptors[extent], row_bytes, offset)
            gathered = data[place * row_bytes : (place + 1) * row_bytes]
            if stored != gathered:
                raise self._difference(row, bytes(gathered), stored, self._extents[extent].path, offset)

    def _place(self, row: int) -> tuple[int, int]:
        """Number of the extent of a row, and the row's offset in its file."""
        extent = bisect_right(self._firsts, row) - 1
        return extent, row * self._row_bytes + self._shifts[extent]

    def _difference(self, row: int, gathered: bytes, stored: bytes, path: str, offset: int) -> ReadError:
        if len(stored) < self._row_bytes:
            what = f"the file ends {self._row_bytes - len(stored)} bytes before the end of the row"
        elif (other := self._neighbour_with(gathered, row)) is not None:
            what = f"what was gathered is row {other}: it was read at a wrong offset, or put in a wrong place"
        else:
            same = next(byte for byte, (one, two) in enumerate(zip(gathered, stored, strict=True)) if one != two)
            what = f"they differ from byte {same} of the row on, of {self._row_bytes}, as after a short read"
        message = f"row {row} was gathered with other bytes than {path} has at offset {offset}; {what}"
        return ReadError(message, path=path, offset=offset, wanted=self._row_bytes, got=len(stored))

    def _neighbour_with(self, gathered: bytes, row: int) -> int | None:
        """The row next to `row` that has these bytes."""
        rows = self._extents[-1].first_row + self._extents[-1].rows
        for other in (row + step for step in _NEIGHBOURS):
            if 0 <= other < rows:
                extent, offset = self._place(other)
                if os.pread(self._descriptors[extent], self._row_bytes, offset) == gathered:
                    return other
        return None
