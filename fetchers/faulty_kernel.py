"""Faults below our own fetchers, so that what they do about a bad answer of the kernel is put to use.

A read that is to go wrong is submitted shorter than asked, perhaps empty, so that the kernel itself writes no more than
that; then its result is replaced by the one it is to have.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import Unsupported
from lazyio.fetchers.base import Bytes, Extent, Fetcher, FetcherOptions, Int64, ReadPlan, ReadStats
from lazyio.fetchers.faults import Dice, Faults, allowed, with_faults
from lazyio.fetchers.pread import PreadFetcher, _Arrivals, _Reads
from lazyio.fetchers.progress import Progress
from lazyio.fetchers.reading import Reading
from lazyio.fetchers.ring import Ring
from lazyio.fetchers.uring import UringFetcher

_HONEST = np.iinfo(np.int64).min  # a result that is left as the kernel gave it


def with_faulty_kernel(fetcher: Fetcher, faults: Faults) -> Fetcher:
    """Put a fetcher on a faulty kernel in place of one that reads with `uring` or `pread`, which is closed.

    Windows that are late or out of order, if there are to be any, are so above it. Raises Unsupported for any other
    fetcher: `with_faults` wraps those.
    """
    for faulty in (FaultyUring, FaultyPread):
        if fetcher.name == faulty.name:
            fetcher.close()
            on_bad_kernel = faulty(fetcher.extents, fetcher.row_bytes, fetcher.options, faults)
            order = Faults(late=faults.late, reorder=faults.reorder, delay_s=faults.delay_s, seed=faults.seed)
            return with_faults(on_bad_kernel, order) if faults.late or faults.reorder else on_bad_kernel
    raise Unsupported(f"the kernel's answers to {fetcher.name} can't be replaced: use with_faults around it")


class FaultyRing(Ring):
    """A ring of a kernel whose reads go wrong, and whose `io_uring_enter` is interrupted at the rate of EINTR, though
    never twice in a row.
    """

    def __init__(self, depth: int, block: int, faults: Faults) -> None:
        super().__init__(depth)
        self._block = block
        self._dice = Dice(faults)
        self._interrupted = False

    def _open(self, plan: ReadPlan, progress: Progress, descriptors: NDArray[np.int32], buffer: Bytes) -> Reading:
        reading = super()._open(plan, progress, descriptors, buffer)
        self._plan = plan
        self._answers = np.full(len(plan), _HONEST)
        self._random = self._dice.for_a_read()
        return reading

    def _write(
        self,
        file: NDArray[np.int32],
        offset: Int64,
        length: Int64,
        dest: Int64,
        numbers: Int64,
        tag: int,
        descriptors: NDArray[np.int32],
        address: int,
    ) -> None:
        needed = self._plan.needed[numbers] - (offset - self._plan.offset[numbers])
        results, through = self._dice.results(self._random, needed)
        self._answers[numbers] = np.where(through, _HONEST, results)
        length = allowed(results, through, length, self._block)
        super()._write(file, offset, length, dest, numbers, tag, descriptors, address)

    def _enter(self, wait_for: int) -> None:
        self._interrupted = not self._interrupted and self._random.random() < self._dice.faults.eintr
        if not self._interrupted:
            super()._enter(wait_for)

    def _took_all(self, reading: Reading) -> bool:
        return False  # each result is looked at, since it may have to be another

    def _reap(self, tag: int) -> tuple[Int64, Int64]:
        windows, results = super()._reap(tag)
        answers = self._answers[windows]
        return windows, np.where(answers == _HONEST, results, answers)


class FaultyUring(UringFetcher):
    """io_uring on a kernel that gives bad results; it delays nothing and keeps the order."""

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions, faults: Faults) -> None:
        self._faults = Faults()  # opening is not what is tested
        super().__init__(extents, row_bytes, options)
        self._faults = faults
        self._local = threading.local()

    def _make_ring(self) -> Ring:
        return FaultyRing(self.options.queue_depth, self.alignment.offset, self._faults)


class FaultyPread(PreadFetcher):
    """Positioned reads, in whichever way they are made, on a kernel that gives bad results, as `FaultyUring`."""

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions, faults: Faults) -> None:
        super().__init__(extents, row_bytes, options)
        self._dice = Dice(faults)

    def _attempt(self, reads: _Reads, stats: ReadStats) -> _Arrivals:
        results, through = self._dice.results(self._dice.for_a_read(), reads.wanted)
        answers = np.where(through, _HONEST, results)
        reads._length = allowed(results, through, reads._length, self.alignment.offset)
        with contextlib.closing(super()._attempt(reads, stats)) as arrivals:
            for numbers, found in arrivals:
                planned = answers[np.searchsorted(reads.windows, numbers)]
                yield numbers, np.where(planned == _HONEST, found, planned)
