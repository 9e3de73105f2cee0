"""A table: row ids in, rows out."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lazyio import settings
from lazyio.errors import NetworkFilesystemWarning, RowIndexError, SettingError, TableError
from lazyio.fetchers.base import Bytes, Extent, FetcherOptions, Int64, ReadPlan, ReadStats, RowFetcher
from lazyio.fetchers.mapping import MappedRows
from lazyio.forking import renew_in_child
from lazyio.host import filesystem_of
from lazyio.modes import open_fetcher
from lazyio.ple.codec import decode
from lazyio.ple.plan import Geometry, RowPlan, dedup, distinct_in_ranges
from lazyio.ple.spec import TableSpec
from lazyio.ple.tables import find_table
from lazyio.staging import Staging

#: Copies rows ids [n] to out [n, row_bytes].
Take = Callable[[Int64, Bytes], ReadStats]

# Ids that are looked at together where a request is longer: enough to make a call's cost small, few enough to be
# nothing beside the rows themselves.
_CHUNK_IDS = 1 << 16
# Up to so many rows, plain integers are faster than numpy: a decode step of a few lanes.
_FEW_IDS = 64
# A gather takes at most this part of the budget, so that several can run at once.
_SHARE = 8
# What a row costs beside its bytes while it is gathered: its id, place, order and inverse.
_INDEX_BYTES_PER_ROW = 160


@dataclass(slots=True)
class TableStats(ReadStats):
    """Counts since a table was opened; subtract two to get what lies between.

    `unique_rows` counts what was left after dedup; a fetcher whose rows lie in addressable memory needs none, and then
    it stays 0. `reads` are what the fetcher asked of the kernel: read calls, advised ranges of OS pages, or page faults
    that waited for the device. `service_s` sums the time of each read from submission to completion, 0 where the kernel
    hides it. `wall_s` is time inside gathers, summed over threads.
    """

    gathers: int = 0
    rows: int = 0
    unique_rows: int = 0
    wall_s: float = 0.0

    def add(self, other: ReadStats) -> None:
        """Add the counts of `other`, as far as it has them."""
        ReadStats.add(self, other)  # a dataclass with slots is made twice, which super() does not survive
        if isinstance(other, TableStats):
            self.gathers += other.gathers
            self.rows += other.rows
            self.unique_rows += other.unique_rows
            self.wall_s += other.wall_s

    def __sub__(self, earlier: TableStats) -> TableStats:
        return TableStats(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__})


class LazyTable:
    """The rows of one table on disk. Use it from any number of threads, and as a context manager.

    Made by `open_table`.
    """

    def __init__(self, spec: TableSpec, mode: str, options: FetcherOptions, *, strict: bool, budget_bytes: int) -> None:
        self.spec = spec
        self._fetcher, self.backend = open_fetcher(mode, spec, options, strict=strict)
        self._geometry = Geometry(spec.extents, spec.row_bytes, self._fetcher.files.index)
        self._staging = Staging(budget_bytes)
        self._share_bytes = budget_bytes // _SHARE
        self._piece_rows = max(1, self._share_bytes // (2 * spec.row_bytes + _INDEX_BYTES_PER_ROW))
        # A window holds at least a row, and at most two blocks more.
        self._few_ids = min(_FEW_IDS, self._share_bytes // (spec.row_bytes + 2 * self._fetcher.alignment.offset))
        self._gate = _Gate()
        self._mapped = self._map(options)
        self._take = self._way_to_take()

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return self.spec.rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as stored."""
        return self.spec.row_bytes

    @property
    def row_values(self) -> int:
        """Values of a row; 0 where this package does not know the type."""
        return self.spec.row_values

    @property
    def dtype(self) -> str:
        """Name of the stored type, as in `TableSpec`."""
        return self.spec.dtype

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where the rows lie."""
        return self.spec.extents

    def stats(self) -> TableStats:
        """Counts since the table was opened."""
        with self._gate.lock:
            return replace(self._gate.stats)

    def gather(self, ids: Any, out: Bytes | None = None) -> Bytes:
        """Return the rows `ids`, in the order asked: uint8 [*ids.shape, row_bytes].

        `ids` are ints of any shape, duplicates welcome: each distinct row is read once. `out`, if given, is filled and
        returned; it must be C-contiguous uint8 of that shape.
        Raises RowIndexError for an id outside the table, before anything is read; TypeError where ids are no integers;
        ReadError for a failed or short read, or a file that changed after it was opened.
        """
        asked = _integers(ids)
        few = asked.reshape(-1).tolist() if self._take is None and asked.size <= self._few_ids else []
        if few:
            self._refuse_outside(min(few), max(few))
        else:
            self._validate(asked)
        result = self._result(asked.shape, out)
        with _Gather(self._gate, asked.size) as stats:
            if few:
                self._gather_few(few, result, stats)
                return result
            rows = result.reshape(asked.size, self.row_bytes)
            if self._take is not None:
                for start, chunk in _chunks(asked):
                    stats.add(self._take(chunk, rows[start : start + len(chunk)]))
            elif asked.size <= self._piece_rows:
                self._gather_once(_flat(asked), rows, stats)
            else:
                self._gather_in_ranges(asked, rows, stats)
        return result

    def gather_unique(self, ids: Any) -> tuple[Bytes, Int64]:
        """Return the distinct rows of `ids`, uint8 [unique, row_bytes] by ascending id, and the inverse.

        The inverse is int64 of the shape of `ids`: `rows[inverse]` is what `gather(ids)` returns. Raises as that does.
        """
        asked = _integers(ids)
        self._validate(asked)
        with _Gather(self._gate, asked.size) as stats:
            unique, inverse = dedup(_flat(asked))
            stats.unique_rows = len(unique)
            packed = np.empty((len(unique), self.row_bytes), np.uint8)
            for start in range(0, len(unique), self._piece_rows):
                piece = unique[start : start + self._piece_rows]
                rows = packed[start : start + len(piece)]
                if self._take is not None:
                    stats.add(self._take(piece, rows))
                    continue
                plan = self._plan(piece)
                with self._staging.lease(self._buffer_bytes(plan)) as buffer:
                    self._read(plan, buffer, rows, stats)
        return packed, inverse.reshape(asked.shape)

    def decode(self, packed: Bytes, dtype: Any = np.float32) -> NDArray[Any]:
        """Turn packed rows, uint8 [..., row_bytes], into values [..., row_values] of `dtype` (float32 or float16).

        Raises Unsupported for a stored type without a decoder, TableError for rows of another length.
        """
        if packed.shape[-1:] != (self.row_bytes,):
            raise TableError(f"packed rows are {self.row_bytes} bytes long here, not {packed.shape[-1:]}")
        return decode(packed, self.dtype, dtype, scale=self.spec.scale)

    def close(self) -> None:
        """Wait for gathers under way, then free everything. Harmless when done twice."""
        if self._gate.close():
            if self._mapped is not None:
                self._mapped.close()
            self._fetcher.close()
            self._staging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<LazyTable {self.spec.tensor} {self.n_rows} x {self.row_values} {self.dtype} by {self.backend.fetcher}>"
        )

    def _validate(self, asked: NDArray[Any]) -> None:
        if not asked.size:
            return
        if asked.dtype == np.int64 and asked.view(np.uint64).max() < self.n_rows:
            return  # the common case in one pass: negative ids are huge ones here
        self._refuse_outside(int(asked.min()), int(asked.max()))

    def _refuse_outside(self, low: int, high: int) -> None:
        if low < 0 or high >= self.n_rows:
            wrong = low if low < 0 else high
            raise RowIndexError(
                f"row {wrong} is outside the table {self.spec.tensor}, which has rows 0 to {self.n_rows - 1}"
            )

    def _result(self, shape: tuple[int, ...], out: Bytes | None) -> Bytes:
        wanted = (*shape, self.row_bytes)
        if out is None:
            return np.empty(wanted, np.uint8)
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out must be an array of uint8 {wanted}, and is a {type(out).__name__}")
        if out.shape != wanted or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(
                f"out must be writeable C-contiguous uint8 {wanted}, and is {out.dtype} {out.shape}"
                f"{'' if out.flags.c_contiguous else ', not contiguous'}{'' if out.flags.writeable else ', read-only'}"
            )
        return out

    def _map(self, options: FetcherOptions) -> MappedRows | None:
        """Map the files of a fetcher that reads through the page cache: what it has read once is copied from there."""
        if isinstance(self._fetcher, RowFetcher) or self._fetcher.direct_io:
            return None
        try:
            return MappedRows(
                self._fetcher.files,
                self.extents,
                self.row_bytes,
                safe=options.mmap_safe,
                rss_bytes=options.mmap_rss_bytes,
            )
        except OSError:
            return None  # files that can't be mapped: every gather reads

    def _way_to_take(self) -> Take | None:
        """How rows are copied out of addressable memory; None where they go through staging."""
        fetcher, mapped = self._fetcher, self._mapped
        if isinstance(fetcher, RowFetcher):
            return fetcher.take
        return None if mapped is None else lambda ids, out: mapped.take(ids, out, self._bring_in)

    def _bring_in(self, absent: Int64) -> ReadStats:
        """Read rows for the sake of what that leaves in the page cache."""
        stats = ReadStats()
        plan = self._plan(dedup(absent)[0])
        with self._staging.lease(self._buffer_bytes(plan)) as buffer:
            for piece, _ in plan.pieces(len(buffer)):
                stats.add(self._fetcher.read(piece.reads, buffer))
        return stats

    def _gather_few(self, ids: list[int], result: Bytes, stats: TableStats) -> None:
        """Gather the rows of a decode step: nothing per call that would show beside one read."""
        reads, position = self._geometry.plan_few(ids, self._fetcher.alignment)
        self._check_files(reads)
        stats.unique_rows = len(position)
        row_bytes, start = self.row_bytes, 0
        with self._staging.lease(reads.buffer_bytes) as buffer:
            stats.add(self._fetcher.read(reads, buffer))
            source, target = buffer.data, result.data.cast("B")
            for row in ids:
                target[start : start + row_bytes] = source[position[row] : position[row] + row_bytes]
                start += row_bytes

    def _gather_once(self, ids: Int64, rows: Bytes, stats: TableStats) -> None:
        if not len(ids):
            return
        unique, inverse = dedup(ids)
        stats.unique_rows = len(unique)
        plan = self._plan(unique)
        buffer_bytes = self._buffer_bytes(plan)
        with self._staging.lease(buffer_bytes + len(unique) * self.row_bytes) as area:
            packed = area[buffer_bytes:].reshape(len(unique), self.row_bytes)
            self._read(plan, area[:buffer_bytes], packed, stats)
            packed.take(inverse, axis=0, out=rows, mode="clip")

    def _gather_in_ranges(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Gather a request that is too long to be deduplicated at once, one range of ids after the other."""
        in_ranges = distinct_in_ranges(lambda: (chunk for _, chunk in _chunks(asked)), self.n_rows, self._piece_rows)
        for low, high, unique in in_ranges:
            stats.unique_rows += len(unique)
            plan = self._plan(unique)
            buffer_bytes = self._buffer_bytes(plan)
            with self._staging.lease(buffer_bytes + len(unique) * self.row_bytes) as area:
                packed = area[buffer_bytes:].reshape(len(unique), self.row_bytes)
                self._read(plan, area[:buffer_bytes], packed, stats)
                for start, chunk in _chunks(asked):
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


class _Extractor:
    """Copies rows out of landed windows while the next ones are still being read."""

    # Fewer rows than this are not worth a call of their own.
    _AT_LEAST = 1024

    def __init__(self, plan: RowPlan, buffer: Bytes, packed: Bytes) -> None:
        self._plan = plan
        self._anywhere = _items_anywhere(buffer, packed.shape[1])
        self._rows = _as_items(packed)
        self._done = 0

    def landed(self, windows: int) -> None:
        """The first `windows` windows are in the buffer."""
        rows = int(self._plan.first_row[windows])
        if rows - self._done >= self._AT_LEAST or rows == len(self._rows) > self._done:
            now = slice(self._done, rows)
            self._rows[now] = self._anywhere[self._plan.position[now]]
            self._done = rows


class _Gate:
    """Knows the gathers under way, so that closing can wait for them, and sums up what they did."""

    def __init__(self) -> None:
        self.stats = TableStats()
        self.closed = False
        self.renew()
        renew_in_child(self)

    def renew(self) -> None:
        """Forget the gathers of other threads, which a child does not have."""
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.under_way = 0

    def close(self) -> bool:
        """Refuse new gathers and wait for the rest; False if that was done before."""
        with self.lock:
            if self.closed:
                return False
            self.closed = True
            self.idle.wait_for(lambda: not self.under_way)
            return True


class _Gather:
    """One gather passing the gate; what it does is counted in the stats that it is entered with."""

    __slots__ = ("_gate", "_started", "_stats")

    def __init__(self, gate: _Gate, rows: int) -> None:
        self._gate = gate
        self._stats = TableStats(gathers=1, rows=rows)

    def __enter__(self) -> TableStats:
        gate = self._gate
        with gate.lock:
            if gate.closed:
                raise TableError("the table is closed")
            gate.under_way += 1
        self._started = time.perf_counter()
        return self._stats

    def __exit__(self, *_: object) -> None:
        gate, stats = self._gate, self._stats
        stats.wall_s = time.perf_counter() - self._started
        with gate.lock:
            gate.under_way -= 1
            if not gate.under_way and gate.closed:
                gate.idle.notify_all()
            gate.stats.add(stats)


def _as_items(rows: Bytes) -> NDArray[np.void]:
    """View rows [n, row_bytes] as n items."""
    return rows.reshape(-1).view(f"V{rows.shape[1]}")


def _items_anywhere(buffer: Bytes, row_bytes: int) -> NDArray[np.void]:
    """View a buffer as the rows that begin at each of its bytes, wherever a window happens to put one."""
    return np.ndarray((len(buffer) - row_bytes + 1,), f"V{row_bytes}", buffer, strides=(1,))


def _integers(ids: Any) -> NDArray[Any]:
    array = np.asarray(ids)
    if array.dtype.kind in "iu":
        return array
    if not array.size and not isinstance(ids, np.ndarray):
        return array.astype(np.int64)  # an empty list has no type of its own
    raise TypeError(f"row ids must be integers of at most 64 bits, and are {array.dtype}")


def _flat(ids: NDArray[Any]) -> Int64:
    return np.ascontiguousarray(ids, np.int64).reshape(-1)


def _chunks(ids: NDArray[Any]) -> Iterator[tuple[int, Int64]]:
    """Runs of ids in C order, with the place of the first: no copy of the whole, whatever its layout."""
    flat = ids.reshape(-1) if ids.flags.c_contiguous else ids.flat
    for start in range(0, ids.size, _CHUNK_IDS):
        yield start, np.asarray(flat[start : start + _CHUNK_IDS], np.int64)


def open_table(
    path: str | os.PathLike[str] | TableSpec,
    tensor: str | None = None,
    *,
    mode: str | None = None,
    strict: bool | None = None,
    direct_io: str | None = None,
    workers: int | None = None,
    queue_depth: int | None = None,
    block_bytes: int | str | None = None,
    budget: int | str | None = None,
    reserve: int | str | None = None,
    mmap_rss: int | str | None = None,
    mmap_safe: bool | None = None,
    extra: dict[str, Any] | None = None,
) -> LazyTable:
    """Open a table in a GGUF file (any part of a split one), a safetensors file or a folder of those.

    Without `tensor` it is the per-layer embedding table, found by itself. `mode` is a lazy mode (off, on, on-bare,
    on-direct, uring, auto) or the name of a registered fetcher. What is None comes from the environment
    (`LAZYIO_...`), else from the defaults that docs/settings.md lists. Sizes are bytes, or text such as "512MiB".
    A raw file is opened through `lazyio.ple.raw.raw_table(...)`, whose spec is given as `path`. `extra` is handed to
    fetchers of third parties.

    Raises TableError where there is no such table or its file can't be used, SettingError for a setting that is
    malformed or has no effect in this mode, NeverFits where mode off is asked for and memory does not suffice,
    Unsupported under `strict` where something can't be had as asked.
    """
    given = {
        "direct_io": direct_io,
        "workers": workers,
        "queue_depth": queue_depth,
        "block_bytes": block_bytes,
        "budget": budget,
        "reserve": reserve,
        "mmap_rss": mmap_rss,
        "mmap_safe": mmap_safe,
    }
    mode = settings.resolve("lazy_mode", mode)
    settings.check(mode, given)
    options = settings.fetcher_options(given, extra)
    if isinstance(path, TableSpec) and tensor is not None:
        raise SettingError(f"the spec of {path.tensor} is given, so that the tensor name {tensor} has no effect")
    spec = path if isinstance(path, TableSpec) else find_table(path, tensor)
    _warn_of_networks(spec)
    return LazyTable(
        spec, mode, options, strict=settings.resolve("strict", strict), budget_bytes=settings.resolve("budget", budget)
    )


def _warn_of_networks(spec: TableSpec) -> None:
    for path in dict.fromkeys(extent.path for extent in spec.extents):
        try:
            filesystem = filesystem_of(path)
        except OSError:
            return  # opening it will say why
        if filesystem.network:
            warnings.warn(
                f"{path} lies on {filesystem.kind}, where each of thousands of small reads is a message: copy it to a "
                "local disk, or load it with mode off",
                NetworkFilesystemWarning,
                stacklevel=3,
            )
            return
