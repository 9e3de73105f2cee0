"""The contract of a fetcher, what it is given and what it gives back.

A fetcher reads byte windows of files into memory. It knows nothing of ids, types, dedup or models: the table above it
turns ids into a `ReadPlan`, and takes the rows out of what the fetcher has read. To write one, subclass `Fetcher`,
implement `read` and `close`, register the class under the entry-point group `lazyio.fetchers`, and run
`lazyio.fetchers.conformance.FetcherConformance` on it. docs/fetchers/write-your-own.md has a whole example.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.files import FileSet

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

#: Called as `landed(n)` when the first n windows of a plan are in the buffer. n only grows.
Landed = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of consecutive rows in one file."""

    path: str
    offset: int  # of the first row, bytes from the start of the file
    first_row: int  # id of the first row
    rows: int


@dataclass(frozen=True, slots=True)
class FetcherOptions:
    """What a caller asks of a fetcher; a fetcher reports what it really does in its attributes."""

    direct_io: str = "auto"  # auto | on | off: bypass the page cache
    workers: int = 32  # reads at once, of fetchers that work with a pool
    queue_depth: int = 4096  # reads in flight, of fetchers that queue
    block_bytes: int = 0  # smallest read under direct I/O; 0 takes the file's own alignment
    advice: bool = True  # of maps: ask for absent OS pages in batches; off leaves them to demand faults
    mmap_rss_bytes: int = 0  # trim mapped pages beyond this; 0 leaves them to the kernel
    mmap_safe: bool = False  # copy out of maps through the kernel: slower, and a truncated file can't kill the process
    reserve_bytes: int = 0  # memory that a resident table must leave free
    extra: dict[str, Any] = field(default_factory=dict)  # for fetchers of third parties


@dataclass(frozen=True, slots=True)
class Alignment:
    """What windows and buffers must be multiples of, in bytes; (1, 1) where nothing is asked."""

    offset: int = 1
    memory: int = 1


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Byte windows to read: sorted by (extent, offset), not overlapping, each whole multiples of the alignment.

    Arrays have one entry a window. `needed` is how many bytes of the window must exist: under direct I/O the last
    window of a file reaches past its end. Windows land in the buffer at `dest`, in order and without gaps.
    """

    file: NDArray[np.int32]  # index into the fetcher's files
    offset: Int64
    length: Int64
    needed: Int64
    dest: Int64
    buffer_bytes: int

    def __len__(self) -> int:
        return len(self.offset)


@dataclass(slots=True)
class ReadStats:
    """What a fetcher did. `service_s` sums, over all reads, the time from submission to completion.

    A fetcher that can't see single reads (a page fault is the kernel's) leaves `service_s` at 0.
    """

    reads: int = 0
    bytes_read: int = 0
    resumed: int = 0  # reads that came short or were interrupted, and were continued
    service_s: float = 0.0

    def add(self, other: ReadStats) -> None:
        """Add the counts of `other`."""
        self.reads += other.reads
        self.bytes_read += other.bytes_read
        self.resumed += other.resumed
        self.service_s += other.service_s


class Pending(Protocol):
    """Reads that were begun. One that is forgotten is never finished.

    As long as anything may still be written to the buffer, something must hold it: memory that nobody refers to any
    more is freed.
    """

    def finish(self) -> ReadStats:
        """Wait until all windows are in the buffer and nothing is in flight. Called once at most.

        Mostly by the thread that has begun them, and never in a child that was forked since. Raises as `Fetcher.read`
        does.
        """
        ...


class Fetcher(abc.ABC):
    """Reads windows of files into a caller's buffer.

    A fetcher is used by several threads at once, and must survive `fork`: the child may use it after the parent has.
    `fell_back` says, in words for a user, what was asked for and could not be had; None where nothing was.
    Raises `Unsupported` from `__init__` where it can't work at all, so that another fetcher can take its place.
    """

    name: ClassVar[str]

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        self.extents = tuple(extents)
        self.row_bytes = row_bytes
        self.options = options
        self.files = FileSet(extent.path for extent in extents)
        self.alignment = Alignment()
        self.direct_io = False
        self.queue_depth = 1
        self.workers = 1
        self.fell_back: str | None = None

    @abc.abstractmethod
    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        """Fill `buffer` with the windows of `plan`; return when all are there and nothing is in flight.

        `buffer` is uint8 [>= plan.buffer_bytes], aligned to `alignment.memory`. `landed`, if given, may be called from
        this thread while reads are still in flight.
        Raises `ReadError` for a failed or short read, after everything in flight has been waited for.
        """

    def begin(self, plan: ReadPlan, buffer: Bytes) -> Pending:
        """Begin to read a plan and return without waiting, so that the caller can do other things meanwhile.

        Arguments are those of `read`. The thread may read, and begin, other plans before this one is finished, and the
        fetcher may be closed before it is. A fetcher that does not override this reads when it is told to finish.
        """
        return _WhenFinished(self, plan, buffer)

    def close(self) -> None:
        """Free what the fetcher holds. Called once, when no read is under way but those begun and never finished."""
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WhenFinished:
    """A read that is not begun before it is waited for."""

    __slots__ = ("_buffer", "_fetcher", "_plan")

    def __init__(self, fetcher: Fetcher, plan: ReadPlan, buffer: Bytes) -> None:
        self._fetcher, self._plan, self._buffer = fetcher, plan, buffer

    def finish(self) -> ReadStats:
        return self._fetcher.read(self._plan, self._buffer)


class RowFetcher(Fetcher):
    """A fetcher whose rows lie in addressable memory: they are copied straight to where they are wanted.

    The table calls `take`, with no dedup, plan or staging; `read` serves callers that bring a plan.
    """

    def expect(self, ids: Int64) -> ReadStats:
        """Be told that rows `ids` [n], valid and in any order, are taken soon: begin to bring them in, and don't wait.

        A fetcher that does not override this does nothing.
        """
        return ReadStats()

    @abc.abstractmethod
    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        """Copy rows `ids` [n], valid and in any order, to `out` [n, row_bytes], C-contiguous."""

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        """Copy the rows of each window: alignment is 1, so every window is a run of whole rows."""
        first = self._row_at(plan.file, plan.offset)
        count = plan.length // self.row_bytes
        start = np.cumsum(count) - count
        ids = np.repeat(first - start, count) + np.arange(int(count.sum()))
        stats = self.take(ids, buffer[: plan.buffer_bytes].reshape(len(ids), self.row_bytes))
        if landed is not None:
            landed(len(plan))
        return stats

    def _row_at(self, file: NDArray[np.int32], offset: Int64) -> Int64:
        """Ids of the rows that begin at these places."""
        rows = np.full(len(offset), -1, np.int64)
        for extent in self.extents:
            into = offset - extent.offset
            here = (file == self.files.index[extent.path]) & (into >= 0) & (into < extent.rows * self.row_bytes)
            rows[here] = extent.first_row + into[here] // self.row_bytes
        return rows
