"""Positioned reads, a bounded number at once.

Threads that each wait for one read after another have to take turns at the interpreter lock, so they are the last
resort. How reads overlap depends on what the kernel does here:

  past the page cache     native AIO: the kernel is given as many reads as there are workers, and goes on by itself
  through the page cache  it begins the reads of one list while those of the list before are waited for
  where it does neither   threads of a pool take a list each
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import SettingError, Unsupported
from lazyio.fetchers.aio import Context, Requests
from lazyio.fetchers.base import Bytes, Extent, Fetcher, FetcherOptions, Int64, Landed, Pending, ReadPlan, ReadStats
from lazyio.fetchers.direct import open_for_reads
from lazyio.fetchers.progress import Progress
from lazyio.host import kernel_release

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # 0 where the C library has no preadv2
_LIST = 128  # reads at most that a thread carries out one after the other, and then tells
# From this version on a read that must not wait begins what it would have had to wait for.
_BEGINS_READS = (5, 9)

_NONE = np.empty(0, np.int64)

# Numbers of windows, and their results in the kernel's convention: bytes read, or a negated errno.
_Arrived = tuple[Int64, Int64]
_Arrivals = Generator[_Arrived, None, None]
_Part = Future[tuple[Int64, float]]  # results, and the seconds that they took


class PreadFetcher(Fetcher):
    """Reads with at most `options.workers` reads at once a call, directly or through the page cache.

    `aio_refused` says, in words for a user, why direct reads go to the pool of threads; None where they do not.
    Raises SettingError for less than one worker, and as `open_for_reads` does.
    """

    name: ClassVar[str] = "pread"

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self.aio_refused: str | None = None
        self._local = threading.local()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        try:
            if options.workers < 1:
                raise SettingError(f"workers is set to {options.workers}; it must be at least 1")
            self._opened = open_for_reads(self.files, options.direct_io, row_bytes, options.block_bytes)
        except BaseException:
            self.files.close()
            raise
        self.direct_io, self.alignment = self._opened.direct, self._opened.alignment
        self.fell_back = self._opened.reason
        self.workers = self.queue_depth = options.workers
        self._descriptors = np.array(self._opened.descriptors, np.int32)
        self._queues = self.direct_io and self._goes_on_by_itself()
        self._begins = not self.direct_io and self._begins_reads()

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        """Read the plan; the base class has the contract.

        `service_s` is reads in flight integrated over time, and what has ended counts until it is looked for; of the
        pool it is the time in read calls, summed over threads.
        """
        return _Attempts(self, plan, buffer).finish(landed)

    def begin(self, plan: ReadPlan, buffer: Bytes) -> Pending:
        """Begin as many reads of a plan as are made at once; the base class has the contract."""
        ahead = self._context(ahead=True) if self._queues else None
        if ahead is not None and ahead.busy:
            return super().begin(plan, buffer)
        attempts = _Attempts(self, plan, buffer)
        attempts.begin()
        return attempts

    def close(self) -> None:
        """Stop the threads and close the files."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.shutdown()
        own: list[Context] = list(vars(self._local).values())
        self._local = threading.local()
        for context in own:
            if not context.busy:  # else what was begun has it, and may yet be finished
                context.close()  # here: an interrupt would be lost in a finaliser, and this takes a while
        self._opened.close()
        super().close()

    # --- ways to read ------------------------------------------------------------------------------------------------

    def _attempt(self, reads: _Reads, stats: ReadStats) -> _Arrivals:
        """Carry `reads` out once each. Nothing is in flight when the iteration ends or is closed.

        First it yields when the first of them were begun, perhaps without any that has arrived.
        """
        context = self._context(ahead=reads.ahead) if self._queues else None
        if context is not None:
            return context.flow(reads.requests(), self.workers, stats)
        return self._list_ahead(reads, stats) if self._begins else self._pooled(reads, stats)

    def _list_ahead(self, reads: _Reads, stats: ReadStats) -> _Arrivals:
        """Have the page cache begin the reads of one list, then wait for those of the list before."""
        size = -(-self.workers // 2)
        waiting, began = np.empty(0, np.int64), 0.0
        start = 0
        while start < len(reads) or len(waiting):
            fresh = np.arange(start, min(start + size, len(reads)))
            begins = time.perf_counter()
            results = reads.carry_out(fresh, _NOWAIT)
            there = results >= reads.wanted[fresh]
            stats.service_s += time.perf_counter() - begins
            if there.any() or not start:
                yield reads.windows[fresh[there]], results[there]
            if len(waiting):
                results = reads.carry_out(waiting)
                stats.service_s += (time.perf_counter() - began) * len(waiting)
                yield reads.windows[waiting], results
            waiting, began = fresh[~there], begins
            start += len(fresh)
            if not len(waiting):
                size = _LIST  # all of it was cached: nothing is in flight

    def _pooled(self, reads: _Reads, stats: ReadStats) -> _Arrivals:
        """Divide the reads among threads, of which no more wake than there are lists."""
        size, pid = min(_LIST, -(-len(reads) // self.workers)), os.getpid()
        lists = [np.arange(start, min(start + size, len(reads))) for start in range(0, len(reads), size)]
        parts: list[_Part] = [Future() for _ in lists]  # made first, so that none is missed if starting them fails
        try:
            for each, part in zip(lists, parts, strict=True):
                self._pool().submit(_run, part, reads, each)
            yield _NONE, _NONE
            for each, part in zip(lists, parts, strict=True):
                results, service_s = part.result()
                stats.service_s += service_s
                yield reads.windows[each], results
        finally:
            if pid == os.getpid():  # a child has no threads that would end them
                _finish(parts)

    # --- what belongs to a thread or a process -----------------------------------------------------------------------

    def _pool(self) -> ThreadPoolExecutor:
        """The pool of this process: threads do not survive a fork."""
        pid = os.getpid()
        pool = self._pools.get(pid)
        if pool is None:
            pool = self._pools.setdefault(pid, ThreadPoolExecutor(self.workers, "lazyio-pread"))
        return pool

    def _context(self, *, ahead: bool = False) -> Context | None:
        """The queue of this thread, or the one for what it begins ahead; None where the kernel gives none."""
        name = "ahead" if ahead else "context"
        context: Context | None = getattr(self._local, name, None)
        if context is not None and context.usable:
            return context
        if self.aio_refused is None:
            try:
                context = Context(self.workers)
            except Unsupported as refused:
                self.aio_refused = str(refused)
            else:
                setattr(self._local, name, context)
                return context
        return None

    # --- what the kernel does with reads, tried when a file is opened ------------------------------------------------

    def _goes_on_by_itself(self) -> bool:
        """Whether the kernel queues direct reads of every file."""
        context = self._context()
        if context is None:
            return False
        zero = np.zeros(1, np.int64)
        block = zero + self.alignment.offset
        area = np.frombuffer(mmap.mmap(-1, int(block[0])), np.uint8)
        address = zero + area.ctypes.data
        reads = (Requests(zero, descriptor, zero, block, address) for descriptor in self._descriptors)
        try:
            return all(context.goes_on_by_itself(read) for read in reads)
        except Unsupported as refused:
            self.aio_refused = str(refused)
            return False

    def _begins_reads(self) -> bool:
        """Whether a read that must not wait, and so returns with nothing, has at least been begun."""
        release = re.match(r"(\d+)\.(\d+)", kernel_release())
        if not _NOWAIT or release is None or (int(release[1]), int(release[2])) < _BEGINS_READS:
            return False
        answers = [_preadv(file, bytearray(1), 0, _NOWAIT) for file in self._opened.descriptors]
        return all(answer >= 0 or answer == -errno.EAGAIN for answer in answers)


class _Attempts:
    """A plan on its way: each attempt carries out what the one before has left. The first may begin ahead."""

    def __init__(self, fetcher: PreadFetcher, plan: ReadPlan, buffer: Bytes) -> None:
        self._fetcher, self._plan, self._buffer = fetcher, plan, buffer
        self._progress = Progress(plan, fetcher.files, fetcher.alignment)
        self._stats = ReadStats()
        self._windows = np.arange(len(plan))
        self._begun: _Arrivals | None = None
        self._again: list[Int64] = []  # windows that this attempt leaves to the next

    def begin(self) -> None:
        if not len(self._windows):
            return
        self._begun = self._attempt(ahead=True)
        self._again.append(self._progress.settle(*next(self._begun)))
        if self._progress.failure is not None:
            self._begun.close()

    def finish(self, landed: Landed | None = None) -> ReadStats:
        progress, stats = self._progress, self._stats
        while len(self._windows) and progress.failure is None:
            self._end(self._begun or self._attempt(ahead=False), landed)
            self._begun, self._windows, self._again = None, np.sort(np.concatenate(self._again)), []
        if progress.failure is not None:
            raise progress.failure
        stats.bytes_read, stats.resumed = progress.bytes_read, progress.resumed
        return stats

    def _attempt(self, *, ahead: bool) -> _Arrivals:
        self._stats.reads += len(self._windows)
        fetcher = self._fetcher
        reads = _Reads(self._plan, self._progress, self._windows, fetcher._descriptors, self._buffer, ahead=ahead)
        return fetcher._attempt(reads, self._stats)

    def _end(self, arrivals: _Arrivals, landed: Landed | None) -> None:
        """Take what arrives of an attempt, up to its end or to a failure."""
        with contextlib.closing(arrivals):
            for numbers, results in arrivals:
                if not len(numbers):
                    continue
                self._again.append(self._progress.settle(numbers, results))
                if self._progress.failure is not None:
                    return
                if landed is not None:
                    landed(self._progress.landed())


class _Reads:
    """What is missing of some windows of a plan, as reads.

    Arrays [n] of the numbers of the windows, and of the bytes that each read must bring. `ahead` tells that they are
    begun before somebody waits for them.
    """

    def __init__(
        self,
        plan: ReadPlan,
        progress: Progress,
        windows: Int64,
        descriptors: NDArray[np.int32],
        buffer: Bytes,
        *,
        ahead: bool = False,
    ) -> None:
        self.windows, self.ahead = windows, ahead
        self._offset, self._length, self._dest = progress.rest(windows)
        self.wanted = plan.needed[windows] - (self._offset - plan.offset[windows])
        self._descriptor = descriptors[plan.file[windows]]
        self._buffer = buffer

    def __len__(self) -> int:
        return len(self.windows)

    def requests(self) -> Requests:
        """All of them, for native AIO."""
        address = self._dest + self._buffer.ctypes.data
        return Requests(self.windows, self._descriptor, self._offset, self._length, address, self._buffer)

    def carry_out(self, which: Int64, flags: int = 0) -> Int64:
        """Carry out some of them, with a call each; return their results."""
        view = self._buffer.data
        columns = (array[which].tolist() for array in (self._descriptor, self._offset, self._dest, self._length))
        places = zip(*columns, strict=True)
        results = [_preadv(file, view[dest : dest + length], offset, flags) for file, offset, dest, length in places]
        return np.array(results, np.int64)


def _run(part: _Part, reads: _Reads, which: Int64) -> None:
    """Carry out some reads in a thread of a pool, unless they were given up."""
    if not part.set_running_or_notify_cancel():
        return
    since = time.perf_counter()
    try:
        part.set_result((reads.carry_out(which), time.perf_counter() - since))
    except BaseException as error:
        part.set_exception(error)


def _preadv(descriptor: int, target: Any, offset: int, flags: int) -> int:
    """Read once; return the bytes read, or the negated errno."""
    try:
        return os.preadv(descriptor, [target], offset, flags)
    except OSError as error:
        return -(error.errno or errno.EIO)


def _finish(parts: Sequence[_Part]) -> None:
    """Wait until no part is being read any more; an interrupt is raised only afterwards."""
    interrupted: KeyboardInterrupt | None = None
    waiting = [part for part in parts if not part.cancel()]
    while True:
        try:
            wait(waiting)
            break
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt
    if interrupted is not None:
        raise interrupted
