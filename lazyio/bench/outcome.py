"""A comparison, and its JSON form."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lazyio import host, settings
from lazyio.bench.limit import DeviceLimit
from lazyio.bench.residency import PAGE_BYTES
from lazyio.bench.rounds import STEADY_WITHIN, Section
from lazyio.bench.take import TakeBaseline
from lazyio.bench.workload import Workload
from lazyio.ple.spec import TableSpec
from lazyio.version import __version__


@dataclass(slots=True)
class Outcome:
    """What was measured on one table so far; `complete` if that is all.

    `proved_pages` is the number of OS pages shown absent before each cold arm.
    """

    spec: TableSpec
    workload: Workload
    limit: DeviceLimit
    take: TakeBaseline
    sections: Sequence[Section]
    proved_pages: int
    complete: bool = False

    def as_json(self) -> dict[str, Any]:
        """The form that docs/bench.md describes."""
        return {
            "lazyio_version": __version__,
            "complete": self.complete,
            "table": self._table(),
            "workload": {**self.workload.as_json(), "windows": self.limit.windows},
            "device_limit": self.limit.as_json(),
            "take_limit": self.take.as_json(),
            "runs": [run.as_json() for section in self.sections for run in section.runs],
            "unfinished": [run.as_json() for section in self.sections for run in section.unfinished],
            "summary": {section.temperature: asdict(section.summary()) for section in self.sections},
            "method": self._method(),
        }

    def _table(self) -> dict[str, Any]:
        spec = self.spec
        filesystem = host.filesystem_of(spec.extents[0].path)
        return {
            "path": spec.path,
            "tensor": spec.tensor,
            "dtype": spec.dtype,
            "rows": spec.rows,
            "row_bytes": spec.row_bytes,
            "row_values": spec.row_values,
            "table_bytes": spec.table_bytes,
            "extents": len(spec.extents),
            "filesystem": filesystem.kind,
            "device": filesystem.device,
        }

    def _method(self) -> dict[str, Any]:
        rules = self.sections[0].rules
        return {
            "command": shlex.join(["lazyio", *sys.argv[1:]]),
            "settings": settings.differing(),
            "verify": self.verify,
            "rounds": rules.rounds,
            "order": "every arm once a round, one arm twice, reversed in every other round",
            "twice": self.sections[0].twice.label,
            "repeats": [
                {"section": section.temperature, "round": repeat.round, "reason": repeat.reason}
                for section in self.sections
                for repeat in section.repeats
            ],
            "max_repeats": rules.max_repeats,
            "min_iops": rules.min_iops,
            "steady_within": STEADY_WITHIN,
            "cold_proof": self.cold_proof(),
            "reads_per_s": "windows of the workload a second: ubatches deduplicated and merged, the same for all modes",
            "ratio_to_device_limit": "reads_per_s over the mean of the two limit arms next to the run",
            "ratio_to_take": "rows_per_s over the mean of the two np.take arms next to the run",
            "bytes": "equal in all runs, and a sample of rows equal to plain reads of the file",
            "kernel": host.kernel_release(),
            "cpus": os.cpu_count(),
        }

    @property
    def verify(self) -> int:
        """How many rows of every gather were read once more and compared."""
        count: int = settings.resolve("verify", self.sections[0].arms[0].settings.get("verify"))
        return count

    def cold_proof(self) -> str | None:
        """In words; None where nothing had to be cold."""
        if all(section.temperature != "cold" for section in self.sections):
            return None
        return (
            f"0 of {self.proved_pages:,} OS pages of {PAGE_BYTES:,} bytes in memory before each run, "
            "counted with mincore on a fresh map"
        )
