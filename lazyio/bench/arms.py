"""Running one arm: the table opened anew, cold or warm as asked, and nothing timed but the gathers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lazyio import settings
from lazyio.bench.cold import make_cold
from lazyio.bench.equal import Verifier
from lazyio.bench.gauge import Counters, Gauge
from lazyio.bench.residency import resident_pages
from lazyio.bench.runs import Arm, Run
from lazyio.bench.workload import Workload
from lazyio.fetchers.base import Bytes, Int64
from lazyio.gate import TableStats
from lazyio.modes import Backend
from lazyio.ple.spec import TableSpec
from lazyio.table import LazyTable, open_table

# Rows of several ubatches are kept, up to this, and looked at after the clock has stopped.
_OUTPUT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Course:
    """What every arm runs, and how it is judged.

    `windows` counts the reads that the workload takes at least: those of each ubatch, deduplicated and merged.
    """

    spec: TableSpec
    workload: Workload
    windows: int
    verifier: Verifier
    strict: bool = False

    def measure(self, arm: Arm, section: str) -> Run:
        """Run `arm` at the temperature of `section`: cold, warm or preloaded.

        Raises NotCold where a cold start can't be proved, RunsDifferError for bytes that differ from other arms', and
        what `open_table` and `gather` raise.
        """
        resident = 0
        if section != "warm":
            make_cold(self.spec)
        if section == "preloaded":
            self._preload()
            resident = resident_pages(self.spec)
        asked = arm.settings if section == "warm" else without_cache(arm)
        with open_table(self.spec, mode=arm.mode, strict=self.strict or None, **asked) as table:
            if section == "warm":
                for ids in self.workload.ubatches:
                    table.gather(ids)
                resident = resident_pages(self.spec)
            return self._timed(arm, section, table, resident)

    def _preload(self) -> None:
        """Bring the workload's own rows into the page cache, and nothing else."""
        with open_table(self.spec, mode="uring", direct_io="off") as table:
            for ids in self.workload.ubatches:
                table.gather_unique(ids)

    def _timed(self, arm: Arm, section: str, table: LazyTable, resident: int) -> Run:
        before = table.stats()
        latencies, counted = self.time(arm.label, table.gather)
        return self._run(arm, section, table.backend, counted, latencies, table.stats() - before, resident)

    def time(self, label: str, gather: Callable[[Int64, Bytes], object]) -> tuple[list[float], Counters]:
        """Gather all ubatches; the seconds that each took, and what was counted meanwhile.

        Every byte is checked, while the clock stands. Raises RunsDifferError.
        """
        gauge, latencies = Gauge(self.spec.extents[0].path), list[float]()
        for group in self.workload.groups(self.spec.row_bytes, _OUTPUT_BYTES):
            ubatches = self.workload.ubatches[group]
            # Filled beforehand, so that no page faults while the clock runs.
            outputs = [np.full((len(ids), self.spec.row_bytes), 0xA5, np.uint8) for ids in ubatches]
            gauge.start()
            for ids, out in zip(ubatches, outputs, strict=True):
                start = time.perf_counter()
                gather(ids, out)
                latencies.append(time.perf_counter() - start)
            gauge.stop()
            for number, out in enumerate(outputs, group.start):
                self.verifier.check(label, number, out)
        return latencies, gauge.total

    def _run(
        self,
        arm: Arm,
        section: str,
        backend: Backend,
        counted: Counters,
        latencies: list[float],
        stats: TableStats,
        resident: int,
    ) -> Run:
        wall = sum(latencies)
        service = _service(stats, counted)
        p50, p99 = (1e6 * np.percentile(latencies, [50, 99])).tolist() if self.workload.decode else (None, None)
        return Run(
            mode=arm.mode,
            arm=arm.label,
            backend_used=backend.fetcher,
            fallback_reason=backend.fallback_reason,
            direct_io=backend.direct_io,
            temperature="resident" if backend.fetcher == "resident" else section,
            section=section,
            workers=backend.workers,
            queue_depth=backend.queue_depth,
            block_bytes=backend.block_bytes,
            rows=self.workload.rows,
            unique_rows=self.workload.unique_rows,
            windows=self.windows,
            cache_hits=stats.cache_hits,
            reads=stats.reads,
            bytes_read=stats.bytes_read,
            device_read_bytes=counted.device_read_bytes,
            syscr=counted.syscr,
            wall_s=wall,
            user_s=counted.user_s,
            system_s=counted.system_s,
            caller_cpu_s=counted.thread_s,
            major_faults=counted.major_faults,
            service_us_mean=1e6 * service.total_s / service.reads if service else None,
            effective_concurrency=service.total_s / wall if service else None,
            service_source=service.source if service else None,
            resident_pages_before=resident,
            rows_per_s=self.workload.rows / wall,
            rows_per_cpu_s=counted.per_cpu_s(self.workload.rows),
            reads_per_s=self.windows / wall,
            p50_us=p50,
            p99_us=p99,
        )


def without_cache(arm: Arm) -> dict[str, Any]:
    """The settings of an arm, and no row cache: rows that were kept would hide what the device does."""
    return {**({"row_cache": 0} if settings.applies("row_cache", arm.mode) else {}), **arm.settings}


@dataclass(frozen=True, slots=True)
class _Service:
    total_s: float
    reads: int
    source: str


def _service(stats: TableStats, counted: Counters) -> _Service | None:
    """Time that reads took in all: as the fetcher saw it, else as the disk did, other processes' reads included."""
    if stats.service_s > 0 and stats.reads:
        return _Service(stats.service_s, stats.reads, "fetcher")
    # What the disk did while this process read nothing of it was done for others.
    if counted.device_read_bytes != 0 and counted.disk_reads and counted.disk_read_s is not None:
        return _Service(counted.disk_read_s, counted.disk_reads, "device")
    return None
