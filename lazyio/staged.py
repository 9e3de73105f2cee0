"""Rows that a fetcher reads window by window, by way of staging, and those of them that a cache keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.base import Bytes, Fetcher, Int64, Pending, ReadPlan, ReadStats
from lazyio.fetchers.mapping import MappedRows
from lazyio.gate import TableStats
from lazyio.ple.cache import RowCache
from lazyio.ple.plan import Geometry, RowPlan, dedup, distinct_in_ranges
from lazyio.ple.spec import TableSpec
from lazyio.staging import Area, Staging

#: Ends what was begun, and says what that did.
End = Callable[[], ReadStats]
#: Ends a gather that was begun: fills its rows [n, row_bytes], and adds what that did to the stats.
#: Called once at most, by the thread that has begun it, in the same process.
Finish = Callable[[Bytes, TableStats], None]
#: Rows that were read and are not in the cache yet: ids [n] and rows [n, row_bytes].
PutOff = list[tuple[Int64, Bytes]]

# Ids that are looked at together where a request is longer: enough to make a call's cost small, few enough to be
# nothing beside the rows themselves.
_CHUNK_IDS = 1 << 16
# Up to so many rows, plain integers are faster than numpy: a decode step of a few lanes.
FEW_IDS = 64
# A gather takes at most this part of the budget, so that several can run at once.
_SHARE = 8
# What a row costs beside its bytes while it is gathered: its id, place, order and inverse.
_INDEX_BYTES_PER_ROW = 160
# From so many rows on, which take a disk some milliseconds, the cache has all its memory brought meanwhile.
_MANY_ROWS = 1024


class StagedRows:
    """Rows that a fetcher reads window by window, to `staging`; what was begun goes to `started`, if that has room."""

    def __init__(self, fetcher: Fetcher, spec: TableSpec, staging: Staging, started: Staging) -> None:
        self._fetcher = fetcher
        self._staging, self._started = staging, started
        self.row_bytes, self._table_rows = spec.row_bytes, spec.rows
        self._geometry = Geometry(spec.extents, spec.row_bytes, fetcher.files.index)
        self._share_bytes = staging.budget_bytes // _SHARE
        self.piece_rows = max(1, self._share_bytes // (2 * spec.row_bytes + _INDEX_BYTES_PER_ROW))
        # A window holds at least a row, and at most two blocks more.
        self._few_ids = min(FEW_IDS, self._share_bytes // (spec.row_bytes + 2 * fetcher.alignment.offset))

    def gather(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Read each distinct row once; `Rows` has the contract."""
        if asked.size <= self._few_ids:
            ids = asked.reshape(-1).tolist()
            stats.unique_rows += len(set(ids))
            self._gather_few(ids, rows, stats)
        elif asked.size <= self.piece_rows:
            self._gather_once(np.ascontiguousarray(asked, np.int64).reshape(-1), rows, stats)
        else:
            self._gather_in_ranges(asked, rows, stats)

    def read(self, unique: Int64, rows: Bytes, stats: TableStats) -> None:
        """Read in pieces that keep to the budget; `Rows` has the contract."""
        for start in range(0, len(unique), self.piece_rows):
            piece = slice(start, start + self.piece_rows)
            plan = self._plan(unique[piece])
            with self._staging.lease(self._buffer_bytes(plan)) as buffer:
                self._read(plan, buffer, rows[piece], stats)

    def start(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        """Begin to read each distinct row once; `Rows` has the contract."""
        if not 0 < asked.size <= self.piece_rows:
            return self._later(asked)
        if asked.size > self._few_ids:
            return self._start_many(asked, stats)
        ids = asked.reshape(-1).tolist()
        reads, position = self._geometry.plan_few(ids, self._fetcher.alignment)
        begun = self._begin(reads)
        if begun is None:
            return self._later(asked)
        stats.unique_rows += len(position)

        def finish(rows: Bytes, stats: TableStats) -> None:
            self._copy_few(ids, position, begun.wait(stats), rows)
            begun.give_back()

        return finish

    @contextmanager
    def packed(self, unique: Int64, stats: TableStats) -> Iterator[Bytes]:
        """Read rows `unique`, which ascend and do not repeat, `piece_rows` at most; lend uint8 [unique, row_bytes]."""
        if len(unique) <= self._few_ids:
            few = np.empty((len(unique), self.row_bytes), np.uint8)
            self._gather_few(unique.tolist(), few, stats)
            yield few
            return
        plan = self._plan(unique)
        buffer_bytes = self._buffer_bytes(plan)
        with self._staging.lease(buffer_bytes + len(unique) * self.row_bytes) as area:
            packed = area[buffer_bytes:].reshape(len(unique), self.row_bytes)
            self._read(plan, area[:buffer_bytes], packed, stats)
            yield packed

    def check_files_of(self, ids: Int64) -> None:
        """Raise ReadError where a file that has one of these rows is not what it was."""
        for file in self._geometry.files_of(ids):
            self._fetcher.files.check(file)

    def bring_in(self, absent: Int64) -> ReadStats:
        """Read rows for the sake of what that leaves in the page cache."""
        stats = ReadStats()
        plan = self._plan(dedup(absent)[0])
        with self._staging.lease(self._buffer_bytes(plan)) as buffer:
            for piece, _ in plan.pieces(len(buffer)):
                stats.add(self._fetcher.read(piece.reads, buffer))
        return stats

    def expect(self, ids: Int64, mapped: MappedRows) -> End:
        """Begin to read those of rows `ids` that `mapped` does not have, for the sake of the page cache."""
        begun: list[_Begun] = []

        def begin(absent: Int64) -> ReadStats:
            reads = self._begin(self._plan(dedup(absent)[0]).reads)
            begun.extend(() if reads is None else (reads,))  # without room for them, copying reads the rows
            return ReadStats()

        mapped.expect(ids, begin)

        def end() -> ReadStats:
            stats = ReadStats()
            for reads in begun:
                reads.wait(stats)
                reads.give_back()
            return stats

        return end

    def close(self) -> None:
        """Nothing is held between gathers."""

    def _gather_few(self, ids: list[int], rows: Bytes, stats: TableStats) -> None:
        """Gather the rows of a decode step: nothing per call that would show beside one read."""
        if not ids:
            return
        reads, position = self._geometry.plan_few(ids, self._fetcher.alignment)
        self._check_files(reads)
        with self._staging.lease(reads.buffer_bytes) as buffer:
            stats.add(self._fetcher.read(reads, buffer))
            self._copy_few(ids, position, buffer, rows)

    def _copy_few(self, ids: list[int], position: dict[int, int], buffer: Bytes, rows: Bytes) -> None:
        """Copy rows from their positions in a buffer to `rows` [n, row_bytes], in the order of `ids`."""
        row_bytes, start = self.row_bytes, 0
        source, target = buffer.data, rows.data.cast("B")
        for row in ids:
            target[start : start + row_bytes] = source[position[row] : position[row] + row_bytes]
            start += row_bytes

    def _start_many(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        unique, inverse = dedup(np.ascontiguousarray(asked, np.int64).reshape(-1))
        plan = self._plan(unique)
        begun = self._begin(plan.reads)
        if begun is None:
            return self._later(asked)
        stats.unique_rows += len(unique)

        def finish(rows: Bytes, stats: TableStats) -> None:
            as_items(rows)[:] = _items_anywhere(begun.wait(stats), self.row_bytes)[plan.position[inverse]]
            begun.give_back()

        return finish

    def _later(self, asked: NDArray[Any]) -> Finish:
        return lambda rows, stats: self.gather(asked, rows, stats)

    def _begin(self, reads: ReadPlan) -> _Begun | None:
        """Begin to read a plan; None where its windows have no room, or not now."""
        self._check_files(reads)
        area = self._started.lend_now(reads.buffer_bytes)
        if area is None:
            return None
        buffer = area.bytes[: reads.buffer_bytes]
        return _Begun(self._started, area, buffer, self._fetcher.begin(reads, buffer))

    def _gather_once(self, ids: Int64, rows: Bytes, stats: TableStats) -> None:
        unique, inverse = dedup(ids)
        stats.unique_rows += len(unique)
        with self.packed(unique, stats) as packed:
            packed.take(inverse, axis=0, out=rows, mode="clip")

    def _gather_in_ranges(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Gather a request that is too long to be deduplicated at once, one range of ids after the other."""
        in_ranges = distinct_in_ranges(
            lambda: (chunk for _, chunk in in_chunks(asked)), self._table_rows, self.piece_rows
        )
        for low, high, unique in in_ranges:
            stats.unique_rows += len(unique)
            with self.packed(unique, stats) as packed:
                for start, chunk in in_chunks(asked):
                    here = np.flatnonzero((chunk >= low) & (chunk < high))
                    rows[start + here] = packed[unique.searchsorted(chunk[here])]

    def _plan(self, unique: Int64) -> RowPlan:
        """Plan the reads of rows that ascend and do not repeat, of files that are still what they were."""
        plan = self._geometry.plan(unique, self._fetcher.alignment)
        self._check_files(plan.reads)
        return plan

    def _check_files(self, reads: ReadPlan) -> None:
        files = self._fetcher.files
        for file in (0,) if len(files.paths) == 1 else set(reads.file.tolist()):
            files.check(file)

    def _buffer_bytes(self, plan: RowPlan) -> int:
        """Staging for the windows of a plan, or for as many at a time as fit a gather's share of the budget."""
        whole = plan.reads.buffer_bytes
        return whole if whole <= self._share_bytes else max(self._share_bytes, int(plan.reads.length.max()))

    def _read(self, plan: RowPlan, buffer: Bytes, packed: Bytes, stats: TableStats) -> None:
        """Read the rows of a plan to `packed` [rows, row_bytes], by way of `buffer`."""
        for piece, first in plan.pieces(len(buffer)):
            extractor = _Extractor(piece, buffer, packed[first : first + len(piece.position)])
            stats.add(self._fetcher.read(piece.reads, buffer, extractor.landed))
            extractor.landed(len(piece.reads))


class _Begun:
    """Reads of a plan that were begun, and the area that they land in."""

    __slots__ = ("_area", "_buffer", "_pending", "_staging")

    def __init__(self, staging: Staging, area: Area, buffer: Bytes, pending: Pending) -> None:
        self._staging, self._area, self._buffer, self._pending = staging, area, buffer, pending

    def wait(self, stats: ReadStats) -> Bytes:
        """Wait for the reads; what they brought, until `give_back`.

        After an error the area is not given back, but left to go with whatever still refers to it.
        """
        stats.add(self._pending.finish())
        return self._buffer

    def give_back(self) -> None:
        """The area may be lent again."""
        self._staging.give_back(self._area)


class CachedRows:
    """Rows that are copied from a cache, or read and then kept there."""

    def __init__(self, staged: StagedRows, cache: RowCache) -> None:
        self.staged, self.cache = staged, cache
        self._own = threading.local()  # `put_off` is what the thread has read and not kept, where it puts that off

    def gather(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Copy what is held, and read each distinct row of the rest once; `Rows` has the contract."""
        for start, ids in in_chunks(asked, self.staged.piece_rows):
            out = rows[start : start + len(ids)]
            missing = self._copy_held(ids, out, stats)
            if len(missing):
                unique, inverse = dedup(ids[missing])
                stats.unique_rows += len(unique)
                self._read(unique, out, missing, inverse, stats)

    def read(self, unique: Int64, rows: Bytes, stats: TableStats) -> None:
        """Copy what is held, and read the rest; `Rows` has the contract."""
        for start, ids in in_chunks(unique, self.staged.piece_rows):
            out = rows[start : start + len(ids)]
            missing = self._copy_held(ids, out, stats)
            if len(missing):
                self._read(ids[missing], out, missing, slice(None), stats)

    def start(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        """Copy what is held, and begin to read the rest; `Rows` has the contract."""
        if not 0 < asked.size <= self.staged.piece_rows:
            return lambda rows, stats: self.gather(asked, rows, stats)
        ids = np.ascontiguousarray(asked, np.int64).reshape(-1)
        held = np.empty((len(ids), self.staged.row_bytes), np.uint8)
        missing = self._copy_held(ids, held, stats)
        unique, inverse = dedup(ids[missing])
        read = self.staged.start(unique, stats)

        def finish(rows: Bytes, stats: TableStats) -> None:
            rows[:] = held
            if len(unique):
                packed = np.empty((len(unique), self.staged.row_bytes), np.uint8)
                read(packed, stats)
                self.cache.insert(unique, packed)
                as_items(rows)[missing] = as_items(packed)[inverse]

        return finish

    @contextmanager
    def putting_off(self) -> Iterator[PutOff]:
        """What this thread reads in the with block is listed instead of kept in the cache; `keep` it afterwards."""
        put_off: PutOff = []
        self._own.put_off = put_off
        try:
            yield put_off
        finally:
            self._own.put_off = None

    def keep(self, put_off: PutOff) -> None:
        """Keep in the cache what was put off."""
        for ids, rows in put_off:
            self.cache.insert(ids, rows)

    def close(self) -> None:
        """Free the cache."""
        self.cache.close()

    def _copy_held(self, ids: Int64, out: Bytes, stats: TableStats) -> Int64:
        self.staged.check_files_of(ids)  # of a file that has changed, what is held is no longer right
        missing = self.cache.take(ids, out)
        stats.cache_hits += len(ids) - len(missing)
        if len(missing) >= _MANY_ROWS:
            self.cache.make_ready()
        return missing

    def _read(self, unique: Int64, out: Bytes, places: Int64, inverse: Int64 | slice, stats: TableStats) -> None:
        """Read rows `unique`, keep them, and copy row `inverse[i]` of them to place `places[i]` of `out`."""
        put_off: PutOff | None = getattr(self._own, "put_off", None)
        with self.staged.packed(unique, stats) as packed:
            if put_off is None:
                self.cache.insert(unique, packed)
            else:
                put_off.append((unique, packed.copy()))
            as_items(out)[places] = as_items(packed)[inverse]


class _Extractor:
    """Copies rows out of landed windows while the next ones are still being read."""

    # Fewer rows than this are not worth a call of their own.
    _AT_LEAST = 1024

    def __init__(self, plan: RowPlan, buffer: Bytes, packed: Bytes) -> None:
        self._plan = plan
        self._anywhere = _items_anywhere(buffer, packed.shape[1])
        self._rows = as_items(packed)
        self._done = 0

    def landed(self, windows: int) -> None:
        """The first `windows` windows are in the buffer."""
        rows = int(self._plan.first_row[windows])
        if rows - self._done >= self._AT_LEAST or rows == len(self._rows) > self._done:
            now = slice(self._done, rows)
            self._rows[now] = self._anywhere[self._plan.position[now]]
            self._done = rows


def as_items(rows: Bytes) -> NDArray[np.void]:
    """View rows [n, row_bytes] as n items."""
    return rows.reshape(-1).view(f"V{rows.shape[1]}")


def _items_anywhere(buffer: Bytes, row_bytes: int) -> NDArray[np.void]:
    """View a buffer as the rows that begin at each of its bytes, wherever a window happens to put one."""
    return np.ndarray((len(buffer) - row_bytes + 1,), f"V{row_bytes}", buffer, strides=(1,))


def in_chunks(ids: NDArray[Any], size: int = _CHUNK_IDS) -> Iterator[tuple[int, Int64]]:
    """Runs of ids in C order, with the place of the first: no copy of the whole, whatever its layout."""
    flat = ids.reshape(-1) if ids.flags.c_contiguous else ids.flat
    for start in range(0, ids.size, size):
        yield start, np.asarray(flat[start : start + size], np.int64)
