"""What is measured: an arm, a run of it, and runs of the yardsticks that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Arm:
    """One mode with the settings it is opened with."""

    label: str  # the mode, and the number of workers where several are compared
    mode: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of open_table


@dataclass(frozen=True, slots=True)
class LimitArm:
    """One run of the device's limit: the workload's own windows, shuffled, read without taking rows out."""

    reads_per_s: float
    reads: int
    bytes_read: int
    wall_s: float
    service_us_mean: float
    resident_pages_before: int
    p50_us: float | None = None  # of one step, when decode is measured
    p99_us: float | None = None

    @property
    def in_flight(self) -> float | None:
        """Reads under way on average, by Little's law; None where the time of a read is not known."""
        return 1e-6 * self.service_us_mean * self.reads_per_s or None


@dataclass(frozen=True, slots=True)
class TakeArm:
    """One run of np.take on rows in memory."""

    rows_per_s: float
    rows_per_cpu_s: float | None
    wall_s: float


@dataclass(slots=True)
class Run:
    """One run of one arm. docs/bench.md says what each number means; these names are the keys of the JSON form."""

    mode: str
    arm: str
    backend_used: str
    fallback_reason: str | None
    direct_io: bool
    temperature: str  # cold | warm | preloaded | resident
    section: str  # cold | warm | preloaded: what the other arms of its rounds were
    workers: int
    queue_depth: int
    block_bytes: int
    rows: int
    unique_rows: int
    windows: int
    cache_hits: int
    reads: int
    bytes_read: int
    device_read_bytes: int | None
    syscr: int | None
    wall_s: float
    user_s: float
    system_s: float
    caller_cpu_s: float  # of the thread that gathered
    major_faults: int
    service_us_mean: float | None
    effective_concurrency: float | None
    service_source: str | None  # fetcher | device
    resident_pages_before: int
    rows_per_s: float
    rows_per_cpu_s: float | None  # None where no CPU time was seen
    reads_per_s: float
    p50_us: float | None = None
    p99_us: float | None = None
    round: int = 0
    again: bool = False
    counted: bool = True
    limit_before: float | None = None  # reads/s
    limit_after: float | None = None
    limit_in_flight: float | None = None
    ratio_to_device_limit: float | None = None
    p50_over_limit: float | None = None
    take_before: float | None = None  # rows/s
    take_after: float | None = None
    ratio_to_take: float | None = None
    bound_by: str | None = None  # device | cpu | latency | both
    bound_reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """All of it, with the names of this class as keys."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a yardstick showed at one moment: its rate, and how long one step took where decode is measured."""

    rate: float
    p50_us: float | None = None
    in_flight: float | None = None  # reads, on average


class Yardstick(Protocol):
    """What runs are compared with: measured next to each of them, since the machine is not the same a minute later."""

    name: str
    unit: str  # of its rate

    def run(self) -> Mark:
        """Measure once more."""
        ...

    def compare(self, run: Run, before: Mark, after: Mark) -> None:
        """Set what `run` is beside the two measurements next to it."""
        ...
