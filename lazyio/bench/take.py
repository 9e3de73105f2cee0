"""What a warm gather is compared with: np.take over a map of the file, all of it that is asked for in memory.

That is the least a gather can cost: no check, no dedup, one copy a row. It needs the rows as one array, so a table in
several extents has no such baseline.
"""

from __future__ import annotations

import mmap
import statistics
from dataclasses import asdict
from typing import Any

import numpy as np

from lazyio.bench.arms import Course
from lazyio.bench.residency import opened
from lazyio.bench.runs import Mark, Run, TakeArm
from lazyio.fetchers.base import Bytes, Extent, Int64

# A pass takes milliseconds, so short that whatever else the processor does would show in a single one.
_PASSES = 3


class TakeBaseline:
    """Takes the rows of a workload with numpy alone."""

    name, unit = "np.take", "rows/s"

    def __init__(self, course: Course) -> None:
        self.arms: list[TakeArm] = []
        self._course = course

    @property
    def possible(self) -> bool:
        """Whether the rows lie one after the other in one file."""
        return len(self._course.spec.extents) == 1

    def run(self) -> Mark:
        """Measure once more: the middle one of some passes, after an untimed one that faults the pages in."""
        (extent,), workload = self._course.spec.extents, self._course.workload
        rows = _mapped(extent, self._course.spec.row_bytes)

        def take(ids: Int64, out: Bytes) -> None:
            np.take(rows, ids, axis=0, out=out, mode="clip")

        scratch = np.empty((max(map(len, workload.ubatches)), rows.shape[1]), np.uint8)
        for ids in workload.ubatches:
            take(ids, scratch[: len(ids)])
        passes = [self._course.time(self.name, take) for _ in range(_PASSES)]
        latencies, counted = sorted(passes, key=lambda timed: sum(timed[0]))[_PASSES // 2]
        wall = sum(latencies)
        self.arms.append(TakeArm(workload.rows / wall, counted.per_cpu_s(workload.rows), wall))
        return Mark(self.arms[-1].rows_per_s)

    def compare(self, run: Run, before: Mark, after: Mark) -> None:
        """Set the ratio of `run` to the baseline."""
        run.take_before, run.take_after = before.rate, after.rate
        run.ratio_to_take = run.rows_per_s / ((before.rate + after.rate) / 2)

    def as_json(self) -> dict[str, Any] | None:
        """What the report says of it; None if it was never measured."""
        if not self.arms:
            return None
        return {
            "rows_per_s": statistics.median(arm.rows_per_s for arm in self.arms),
            "arms": [asdict(arm) for arm in self.arms],
        }


def _mapped(extent: Extent, row_bytes: int) -> Bytes:
    """The rows of an extent, uint8 [rows, row_bytes], mapped for as long as the array lives."""
    head = extent.offset % mmap.ALLOCATIONGRANULARITY
    length = head + extent.rows * row_bytes
    with opened(extent.path) as descriptor:
        mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=extent.offset - head)
    mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, np.uint8)[head:].reshape(extent.rows, row_bytes)
