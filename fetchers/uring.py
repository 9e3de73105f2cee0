"""io_uring: all reads of a plan in flight at once, from one thread."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lazyio.errors import ReadError, Unsupported
from lazyio.fetchers.base import Bytes, Extent, Fetcher, FetcherOptions, Landed, Pending, ReadPlan, ReadStats
from lazyio.fetchers.direct import open_for_reads
from lazyio.fetchers.progress import Progress
from lazyio.fetchers.reading import Reading
from lazyio.fetchers.ring import Ring, why_refused


class UringFetcher(Fetcher):
    """Reads through a ring of the calling thread; rings are made when a thread first reads, and die with it."""

    name: ClassVar[str] = "uring"

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self._local = threading.local()
        try:
            opened = open_for_reads(self.files, options.direct_io, row_bytes, options.block_bytes)
        except BaseException:
            self.files.close()
            raise
        self._opened = opened
        self.direct_io, self.alignment, self.fell_back = opened.direct, opened.alignment, opened.reason
        self._descriptors = np.array(opened.descriptors, np.int32)
        try:
            self.queue_depth = self._ring().depth
            self._probe()
        except BaseException:
            self.close()
            raise

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        """Read the plan; the base class has the contract."""
        progress = Progress(plan, self.files, self.alignment)
        try:
            stats = self._ring().read(plan, progress, self._descriptors, buffer, landed)
        except OSError as error:
            path, wanted = self.files.paths[int(plan.file[0])], int(plan.needed.sum())
            raise ReadError(
                f"{len(plan)} reads, the first of {path}, failed together: {error.strerror}",
                path=path,
                offset=int(plan.offset[0]),
                wanted=wanted,
                got=None,
                errno=error.errno,
            ) from error
        return _outcome(progress, stats)

    def begin(self, plan: ReadPlan, buffer: Bytes) -> Pending:
        """Submit the reads of a plan; the base class has the contract."""
        ring = self._ring()
        progress = Progress(plan, self.files, self.alignment)
        return _Begun(self, ring, ring.begin(plan, progress, self._descriptors, buffer))

    def close(self) -> None:
        """Close the calling thread's ring and the files; other threads' rings go when those threads end."""
        own: _OwnRing | None = getattr(self._local, "own", None)
        self._local = threading.local()
        if own is not None:
            own.ring.close()  # here: an interrupt would be lost in a finaliser, and this takes a while
        self._opened.close()
        super().close()

    def _ring(self) -> Ring:
        own: _OwnRing | None = getattr(self._local, "own", None)
        if own is None or own.ring.pid != os.getpid():
            own = self._local.own = _OwnRing(self._make_ring())
        return own.ring

    def _make_ring(self) -> Ring:
        return Ring(self.options.queue_depth)

    def _probe(self) -> None:
        """Read one block of the first file: a kernel may allow rings and still refuse reads."""
        length = max(512, self.alignment.offset)
        zero = np.zeros(1, np.int64)
        plan = ReadPlan(zero.astype(np.int32), zero, zero + length, zero, zero, length)
        try:
            self.read(plan, np.frombuffer(mmap.mmap(-1, length), np.uint8))
        except ReadError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):  # a ring may be made, and may not be entered
                raise Unsupported(why_refused(error.errno)) from error
            raise Unsupported(f"io_uring is there but a first read through it failed: {error}") from error


class _Begun:
    """Reads in a ring. What interrupted them, or made the ring refuse them, does not concern a second attempt."""

    __slots__ = ("_fetcher", "_reading", "_ring")

    def __init__(self, fetcher: UringFetcher, ring: Ring, reading: Reading) -> None:
        self._fetcher, self._ring, self._reading = fetcher, ring, reading

    def finish(self) -> ReadStats:
        reading = self._reading
        if self._ring.finish(reading):
            return _outcome(reading.progress, reading.stats)
        return self._fetcher.read(reading.plan, reading.buffer)


def _outcome(progress: Progress, stats: ReadStats) -> ReadStats:
    if progress.failure is not None:
        raise progress.failure
    stats.bytes_read, stats.resumed = progress.bytes_read, progress.resumed
    return stats


class _OwnRing:
    """A ring that is given back when the thread whose local storage holds it ends."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def __del__(self) -> None:
        self.ring.close()
