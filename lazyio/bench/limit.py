"""The device's limit, measured as one more arm.

The very windows that the workload needs are read, each once, in shuffled order, with a raw ring and nothing else: no
rows are taken out, nothing is sorted, nothing is copied. What is faster than that reads something else.
"""

from __future__ import annotations

import mmap
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lazyio.bench.cold import make_cold
from lazyio.bench.runs import LimitArm, Mark, Run
from lazyio.bench.workload import Workload
from lazyio.errors import Unsupported
from lazyio.fetchers.base import Bytes, Fetcher, FetcherOptions, Int64, ReadPlan
from lazyio.fetchers.registry import load
from lazyio.ple.plan import Geometry, dedup
from lazyio.ple.spec import TableSpec

DEPTHS = (128, 256, 512, 1024, 2048, 4096)
#: Reads in flight where each step is one small plan.
DECODE_DEPTH = 128
POOL_WORKERS = 32
# Bounds the memory of a limit arm; rows of many KiB take fewer windows.
_BUFFER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Windows:
    """Arrays of windows, one entry a window, as in a ReadPlan."""

    file: np.ndarray[Any, np.dtype[np.int32]]
    offset: Int64
    length: Int64
    needed: Int64

    def plan(self, chosen: Int64) -> ReadPlan:
        """The chosen windows in the order given, laid out one after the other."""
        length = self.length[chosen]
        dest = length.cumsum() - length
        return ReadPlan(self.file[chosen], self.offset[chosen], length, self.needed[chosen], dest, int(length.sum()))


class DeviceLimit:
    """Reads the windows of a workload as fast as the device gives them.

    Raises Unsupported with `strict` where a ring or direct I/O can't be had; else the next best is taken and
    `fallback_reason` says so.
    """

    name, unit = "device limit", "reads/s"

    def __init__(
        self, spec: TableSpec, workload: Workload, *, block_bytes: int, reads: int, seed: int, strict: bool
    ) -> None:
        self._spec, self._block_bytes, self._seed = spec, block_bytes, seed
        self.queue_depth = DECODE_DEPTH
        self.depth_trials: dict[int, float] = {}
        self.arms: list[LimitArm] = []
        self.fallback_reason: str | None = None
        with self._open(self.queue_depth) as fetcher:
            self.backend, self.direct_io, self.block_bytes = fetcher.name, fetcher.direct_io, fetcher.alignment.offset
            self.workers = fetcher.workers
            self.fallback_reason = self.fallback_reason or fetcher.fell_back
            plans = _plans(spec, workload, fetcher)
        if strict and self.fallback_reason is not None:
            raise Unsupported(f"the device's limit can't be measured as asked: {self.fallback_reason}")
        #: Windows that each ubatch takes.
        self.windows_of = [len(plan) for plan in plans]
        #: Those of all of them, each counted once a ubatch.
        self.windows = sum(self.windows_of)
        self._steps = plans if workload.decode else None
        self._pool = _distinct(plans)
        self._reads = max(1, min(reads, len(self._pool.offset), _BUFFER_BYTES // int(self._pool.length.max())))
        largest = max(plan.buffer_bytes for plan in plans) if workload.decode else 0
        self._buffer = _page_aligned(max(largest, int(np.sort(self._pool.length)[-self._reads :].sum())))

    def choose_depth(self) -> None:
        """Find the queue depth that reads fastest: each tried twice, on windows of its own, best median.

        A pool, and a step of decoding, have no depth to choose.
        """
        if self._steps is not None or self.backend != "uring":
            return
        share = max(1, self._reads // 4)
        rates: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        for trial, depth in enumerate((*DEPTHS, *reversed(DEPTHS))):
            rates[depth].append(self._shuffled(depth, self._choose(("depth", trial), share)).reads_per_s)
        self.depth_trials = {depth: statistics.median(found) for depth, found in rates.items()}
        self.queue_depth = max(self.depth_trials, key=self.depth_trials.__getitem__)

    def run(self) -> Mark:
        """Measure once more, strict-cold, in another order each time."""
        number = len(self.arms)
        if self._steps is not None:
            arm = self._stepwise(number)
        else:
            arm = self._shuffled(self.queue_depth, self._choose(("arm", number), self._reads))
        self.arms.append(arm)
        return Mark(arm.reads_per_s, arm.p50_us, arm.in_flight)

    def compare(self, run: Run, before: Mark, after: Mark) -> None:
        """Set the ratios of `run` to the limit. A table in memory reads nothing that could be compared."""
        run.limit_before, run.limit_after = before.rate, after.rate
        if run.temperature == "resident":
            return
        run.ratio_to_device_limit = run.reads_per_s / ((before.rate + after.rate) / 2)
        if before.in_flight is not None and after.in_flight is not None:
            run.limit_in_flight = (before.in_flight + after.in_flight) / 2
        if run.p50_us is not None and before.p50_us is not None and after.p50_us is not None:
            run.p50_over_limit = run.p50_us / ((before.p50_us + after.p50_us) / 2)

    @property
    def iops(self) -> float:
        """Reads a second, the median over all runs."""
        return statistics.median(arm.reads_per_s for arm in self.arms)

    def as_json(self) -> dict[str, Any] | None:
        """What the report says of it; None if it was never measured."""
        if not self.arms:
            return None
        return {
            "iops": self.iops,
            "block_bytes": self.block_bytes,
            "queue_depth": self.queue_depth if self.backend == "uring" else None,
            "backend": self.backend,
            "workers": self.workers,
            "direct_io": self.direct_io,
            "fallback_reason": self.fallback_reason,
            "reads_per_arm": self._reads if self._steps is None else self.windows,
            "depth_trials": {str(depth): rate for depth, rate in self.depth_trials.items()},
            "p50_us": statistics.median(known) if (known := [arm.p50_us for arm in self.arms if arm.p50_us]) else None,
            "arms": [asdict(arm) for arm in self.arms],
        }

    def _open(self, depth: int) -> Fetcher:
        options = FetcherOptions(direct_io="on", workers=POOL_WORKERS, queue_depth=depth, block_bytes=self._block_bytes)
        try:
            return load("uring")(self._spec.extents, self._spec.row_bytes, options)
        except Unsupported as error:
            self.fallback_reason = f"a pool of {POOL_WORKERS} reads instead of io_uring: {error}"
            return load("pread")(self._spec.extents, self._spec.row_bytes, options)

    def _choose(self, purpose: tuple[str, int], count: int) -> Int64:
        seed = [self._seed, *purpose[0].encode(), purpose[1]]
        return np.random.default_rng(seed).permutation(len(self._pool.offset))[:count]

    def _shuffled(self, depth: int, chosen: Int64) -> LimitArm:
        make_cold(self._spec)
        plan = self._pool.plan(chosen)
        with self._open(depth) as fetcher:
            self._buffer[: plan.buffer_bytes] = 0  # no page faults while the clock runs
            start = time.perf_counter()
            stats = fetcher.read(plan, self._buffer)
            wall = time.perf_counter() - start
        return LimitArm(len(plan) / wall, stats.reads, stats.bytes_read, wall, 1e6 * stats.service_s / len(plan), 0)

    def _stepwise(self, number: int) -> LimitArm:
        assert self._steps is not None
        make_cold(self._spec)
        latencies, reads, bytes_read, service = [], 0, 0, 0.0
        shuffled = np.random.default_rng([self._seed, number]).permutation(len(self._steps))
        with self._open(self.queue_depth) as fetcher:
            for step in shuffled.tolist():
                start = time.perf_counter()
                stats = fetcher.read(self._steps[step], self._buffer)
                latencies.append(time.perf_counter() - start)
                reads, bytes_read = reads + stats.reads, bytes_read + stats.bytes_read
                service += stats.service_s
        wall = sum(latencies)
        p50, p99 = (float(value) for value in 1e6 * np.percentile(latencies, [50, 99]))
        return LimitArm(self.windows / wall, reads, bytes_read, wall, 1e6 * service / self.windows, 0, p50, p99)


def _plans(spec: TableSpec, workload: Workload, fetcher: Fetcher) -> list[ReadPlan]:
    geometry = Geometry(spec.extents, spec.row_bytes, fetcher.files.index)
    return [geometry.plan(dedup(ids)[0], fetcher.alignment).reads for ids in workload.ubatches]


def _distinct(plans: list[ReadPlan]) -> _Windows:
    """All windows of all plans, those with the same start once: a second read could be answered by a cache."""
    file, offset, length, needed = (
        np.concatenate([getattr(plan, name) for plan in plans]) for name in ("file", "offset", "length", "needed")
    )
    order = np.lexsort((offset, file))
    file, offset, length, needed = (array[order] for array in (file, offset, length, needed))
    first = np.ones(len(offset), bool)
    first[1:] = (file[1:] != file[:-1]) | (offset[1:] != offset[:-1])
    return _Windows(file[first], offset[first], length[first], needed[first])


def _page_aligned(length: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
