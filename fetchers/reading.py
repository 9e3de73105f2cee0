"""The reads of one plan on their way through a ring: which are written, which must be written again."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.base import Bytes, Int64, ReadPlan, ReadStats
from lazyio.fetchers.progress import Progress

_NONE = np.empty(0, np.int64)

#: Reads to write: files, offsets, lengths, places in the buffer, and numbers of their windows; arrays [n].
Batch = tuple[NDArray[np.int32], Int64, Int64, Int64, Int64]


class Reading:
    """Kept by the ring until nothing of it is in flight, and so is `buffer`.

    `intact` tells that it was begun and can be carried on, `complete` that it has ended; `progress` says how.
    """

    __slots__ = (
        "address", "again", "buffer", "complete", "descriptors", "fresh", "intact", "plan", "progress", "since",
        "stats", "tag",
    )  # fmt: skip

    def __init__(
        self, plan: ReadPlan, progress: Progress, descriptors: NDArray[np.int32], buffer: Bytes, tag: int
    ) -> None:
        self.plan, self.progress, self.descriptors = plan, progress, descriptors
        self.buffer, self.address = buffer, buffer.ctypes.data
        self.tag = tag  # what user_data of its reads has beside the number of the window
        self.stats = ReadStats()
        self.since = time.perf_counter()
        self.fresh, self.again = 0, _NONE
        self.intact = self.complete = False

    @property
    def all_written(self) -> bool:
        """Whether each window has been written once at least."""
        return self.fresh == len(self.plan)

    def next(self, room: int) -> Batch:
        """The next reads to write, at most `room`: first what must be read on."""
        plan = self.plan
        if len(self.again):
            numbers, self.again = self.again[:room], self.again[room:]
            offset, length, dest = self.progress.rest(numbers)
            return plan.file[numbers], offset, length, dest, numbers
        stop = min(len(plan), self.fresh + room)
        new, numbers = slice(self.fresh, stop), np.arange(self.fresh, stop)
        self.fresh = stop
        return plan.file[new], plan.offset[new], plan.length[new], plan.dest[new], numbers

    def spent(self, in_flight: int) -> None:
        """Count the time since the last call for each of the reads in flight."""
        now = time.perf_counter()
        self.stats.service_s += in_flight * (now - self.since)
        self.since = now

    def settle(self, windows: Int64, results: Int64) -> None:
        """Take results, as `Progress.settle` does; what must be read on is."""
        refused = self.progress.settle(windows, results)
        if len(refused):
            self.again = np.concatenate([self.again, refused])
