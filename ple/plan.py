"""From row ids to byte windows: exact dedup, and a read plan that merges neighbours."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lazyio.fetchers.base import Alignment, Extent, Int64, ReadPlan

#: Iterates over the ids of a request, int64, in chunks of bounded length.
Chunks = Callable[[], Iterator[Int64]]

# A merged window is cut beyond this, so that a run of neighbours is still read by several reads at once.
MAX_WINDOW_BYTES = 256 << 10


def dedup(ids: Int64) -> tuple[Int64, Int64]:
    """Return the distinct values of `ids` [n], ascending, and for every id its place among them.

    The same as `np.unique(ids, return_inverse=True)`, and fast for a handful of ids too.
    """
    if not len(ids):
        return ids, ids
    order = ids.argsort()
    ascending = ids[order]
    first = np.empty(len(ids), bool)
    first[0] = True
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    rank = first.cumsum()
    rank -= 1
    inverse = np.empty(len(ids), np.int64)
    inverse[order] = rank
    return ascending[first], inverse


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A read plan and where in its buffer each row will be."""

    reads: ReadPlan
    position: Int64  # [rows] of each row, bytes from the start of the buffer
    first_row: Int64  # [windows + 1] number of the first row of each window; rows never straddle windows

    def pieces(self, buffer_bytes: int) -> Iterator[tuple[RowPlan, int]]:
        """Cut into plans whose windows fit a buffer, each with the number of its first row.

        A window that is larger than the buffer comes alone.
        """
        if self.reads.buffer_bytes <= buffer_bytes:
            yield self, 0
            return
        start = 0
        while start < len(self.reads):
            limit = int(self.reads.dest[start]) + buffer_bytes
            ends = self.reads.dest + self.reads.length
            stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
            yield self._piece(start, stop), int(self.first_row[start])
            start = stop

    def _piece(self, start: int, stop: int) -> RowPlan:
        reads = self.reads
        shift = int(reads.dest[start])
        end = int(reads.dest[stop - 1] + reads.length[stop - 1])
        rows = slice(int(self.first_row[start]), int(self.first_row[stop]))
        cut = slice(start, stop)
        return RowPlan(
            ReadPlan(
                reads.file[cut],
                reads.offset[cut],
                reads.length[cut],
                reads.needed[cut],
                reads.dest[cut] - shift,
                end - shift,
            ),
            self.position[rows] - shift,
            self.first_row[start : stop + 1] - self.first_row[start],
        )


class Geometry:
    """Where the rows of a table lie, ready for vector arithmetic."""

    def __init__(self, extents: Sequence[Extent], row_bytes: int, file_index: dict[str, int]) -> None:
        self.row_bytes = row_bytes
        self._firsts = [extent.first_row for extent in extents]
        self._first = np.array(self._firsts, np.int64)
        self._files = [file_index[extent.path] for extent in extents]
        self._file = np.array(self._files, np.int32)
        self._all_files = sorted(set(self._files))
        # offset of row id = id * row_bytes + shift of its extent
        self._shifts = [extent.offset - extent.first_row * row_bytes for extent in extents]
        self._shift = np.array(self._shifts, np.int64)

    def locate(self, ids: Int64) -> tuple[Int64 | None, Int64]:
        """Extent (None where the table has one) and byte offset of each row."""
        if len(self._first) == 1:
            return None, ids * self.row_bytes + self._shift[0]
        extent = np.searchsorted(self._first, ids, side="right") - 1
        return extent, ids * self.row_bytes + self._shift[extent]

    def files_of(self, ids: Int64) -> list[int]:
        """The files in which rows `ids` [n] lie, each once."""
        if len(self._all_files) == 1:
            return self._all_files
        extents = np.searchsorted(self._first, ids, side="right") - 1
        return sorted({self._files[extent] for extent in np.flatnonzero(np.bincount(extents)).tolist()})

    def plan(self, ids: Int64, alignment: Alignment) -> RowPlan:
        """Plan the reads of rows `ids`, which ascend and do not repeat.

        Windows start and end at multiples of `alignment.offset`, a power of two; rows whose windows touch share one.
        """
        block = alignment.offset
        extent, offset = self.locate(ids)
        ends = offset + self.row_bytes
        start = offset & -block
        stop = (ends + (block - 1)) & -block
        head = self._heads(extent, start, stop)
        if head is None:
            first_row = np.arange(len(ids) + 1)
            window_start, length, needed = start, stop - start, ends - start
            of_window = extent
        else:
            first_row = np.append(np.flatnonzero(head), len(ids))
            last = first_row[1:] - 1
            window_start = start[first_row[:-1]]
            length, needed = stop[last] - window_start, ends[last] - window_start
            of_window = None if extent is None else extent[first_row[:-1]]
        dest = np.empty(len(length) + 1, np.int64)
        dest[0] = 0
        length.cumsum(out=dest[1:])
        into = dest[:-1] - window_start
        position = offset + (into if head is None else into[head.cumsum() - 1])
        file = np.zeros(len(length), np.int32) if of_window is None else self._file[of_window]
        return RowPlan(ReadPlan(file, window_start, length, needed, dest[:-1], int(dest[-1])), position, first_row)

    def plan_few(self, ids: Sequence[int], alignment: Alignment) -> tuple[ReadPlan, dict[int, int]]:
        """Plan the reads of a handful of rows, in any order and with duplicates; also return the position of each.

        In plain integers: for so few rows, numpy's cost of a call is more than that of the work.
        """
        up, mask, row_bytes = alignment.offset - 1, -alignment.offset, self.row_bytes
        firsts, shifts = self._firsts, self._shifts
        file: list[int] = []
        offset: list[int] = []
        length: list[int] = []
        needed: list[int] = []
        dest: list[int] = []
        position: dict[int, int] = {}
        extent, head, stop, filled = -1, 0, -1, 0
        for row in sorted(set(ids)):
            before, extent = extent, bisect_right(firsts, row) - 1
            at = row * row_bytes + shifts[extent]
            start, end = at & mask, at + row_bytes
            if start > stop or extent != before or stop - head >= MAX_WINDOW_BYTES:
                head = start
                file.append(self._files[extent])
                offset.append(head)
                length.append(0)
                needed.append(0)
                dest.append(filled)
            stop = (end + up) & mask
            length[-1], needed[-1] = stop - head, end - head
            filled = dest[-1] + stop - head
            position[row] = dest[-1] + at - head
        columns = np.array([*offset, *length, *needed, *dest], np.int64).reshape(4, len(offset))
        return ReadPlan(np.array(file, np.int32), columns[0], columns[1], columns[2], columns[3], filled), position

    def _heads(
        self, extent: Int64 | None, start: Int64, stop: Int64
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Mark the rows at which a new window begins; None where every row has a window of its own."""
        joined = start[1:] <= stop[:-1]
        if extent is not None:
            joined &= extent[1:] == extent[:-1]
        if not np.count_nonzero(joined):
            return None
        head = np.ones(len(start), bool)
        np.logical_not(joined, out=head[1:])
        most = max(1, MAX_WINDOW_BYTES // self.row_bytes)
        heads = np.flatnonzero(head)
        rank = np.arange(len(head)) - heads[head.cumsum() - 1]
        head |= rank % most == 0
        return head


def distinct_in_ranges(ids: Chunks, rows: int, limit: int) -> Iterator[tuple[int, int, Int64]]:
    """Cut the ids 0 .. rows-1 into ranges of which `ids` has at most `limit` distinct ones; yield (low, high, those).

    `ids()` iterates over the request in chunks, and is called about twice a range. So a request of any length is
    deduplicated exactly with memory for `limit` ids.
    """
    ranges = [(0, rows)]
    while ranges:
        low, high = ranges.pop()
        distinct = _distinct(ids, low, high, limit)
        if len(distinct) > limit:
            middle = int(distinct[len(distinct) // 2])
            ranges += [(middle, high), (low, middle)]
        elif len(distinct):
            yield low, high, distinct


def _distinct(ids: Chunks, low: int, high: int, limit: int) -> Int64:
    """The distinct ids from low up to high, ascending; or the first more than `limit` that turn up."""
    distinct = np.empty(0, np.int64)
    pending: list[Int64] = []
    for chunk in ids():
        pending.append(chunk[(chunk >= low) & (chunk < high)])
        if sum(map(len, pending)) > limit:
            distinct, pending = _ascending(np.concatenate([distinct, *pending])), []
            if len(distinct) > limit:
                return distinct
    return _ascending(np.concatenate([distinct, *pending]))


def _ascending(ids: Int64) -> Int64:
    """The distinct values of `ids`, ascending.

    Not np.unique: its first call imports a module, for which a child that is forked meanwhile would wait for ever.
    """
    ids = np.sort(ids)
    first = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]
