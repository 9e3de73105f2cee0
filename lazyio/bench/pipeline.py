"""How much of a prompt's reading hides behind its computing: three ways to order the two, on one table, cold.

Computing is stated, so many microseconds a token, and simulated: by sleeping, as a thread does that waits for a GPU, or
by a loop that keeps the interpreter, as one does that launches many small kernels.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from lazyio import settings
from lazyio.bench.arms import without_cache
from lazyio.bench.bound import Pipelined, Reading, bound_of_pipeline
from lazyio.bench.cold import make_cold
from lazyio.bench.equal import Verifier
from lazyio.bench.limit import DEPTHS, DeviceLimit
from lazyio.bench.options import DEFAULT_LIMIT_READS, DEFAULT_MODES, Request
from lazyio.bench.rounds import STEADY_WITHIN
from lazyio.bench.runs import Arm, Mark
from lazyio.bench.session import table_of
from lazyio.bench.watch import Watch
from lazyio.bench.workload import Workload
from lazyio.errors import SettingError
from lazyio.fetchers.base import Bytes, Int64
from lazyio.gate import TableStats
from lazyio.ple.cuts import Pace, fixed_cuts, makespan_s, plan_cuts
from lazyio.ple.lookahead import Lookahead
from lazyio.ple.spec import TableSpec
from lazyio.table import LazyTable, open_table

#: Iterates over rows and inverse of each ubatch.
Way = Callable[[LazyTable, Sequence[Int64]], Iterable[tuple[Bytes, Int64]]]


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One prompt in one way. Times are seconds from the first request for rows."""

    way: str
    round: int
    wall_s: float
    ready_s: tuple[float, ...]  # when the rows of each ubatch were there, and computing it began
    computed_s: tuple[float, ...]  # when it was computed
    limit_reads_per_s: float  # of the device, the mean of one measurement before and one after
    steady: bool  # whether those two agree
    over_floor: float  # wall_s over the makespan that planned cuts could have at that limit
    over_greater_sum: float  # wall_s over the greater of all reading and all computing
    reading_s: float  # inside gathers, by whichever thread
    reading_cpu_s: float  # CPU time of the process but for computing
    bound_by: str
    bound_reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one prompt. Times are seconds, of moments from the first request for rows."""

    ready_s: list[float]
    computed_s: list[float]
    first_rows: int  # distinct rows of the first ubatch
    stats: TableStats
    cpu_s: float  # of all threads
    computing_cpu_s: float  # of the computing thread while it computed

    def pipelined(self, reads: float, limit: float, limit_in_flight: float | None, *, ahead: bool) -> Pipelined:
        """What tells the bound of it: it made so many reads of a device with that limit."""
        wall, reading_s = self.computed_s[-1], self.stats.wall_s
        computing_s = sum(end - start for start, end in zip(self.ready_s, self.computed_s, strict=True))
        reading_cpu_s = max(0.0, self.cpu_s - self.computing_cpu_s)
        reading = Reading(
            reading_s,
            reading_cpu_s,
            reading_cpu_s,
            reads_device=True,
            of_limit=reads / limit / reading_s,
            in_flight=self.stats.service_s / reading_s,
            limit_in_flight=limit_in_flight,
        )
        kept = self.computing_cpu_s / computing_s if computing_s else 0.0
        return Pipelined(wall, computing_s, kept, reading, self._beside() if ahead else None)

    def _beside(self) -> float | None:
        """Rows a second read after the first ubatch, over those of the first, which nothing was computed beside."""
        rows, seconds = self.stats.unique_rows - self.first_rows, self.stats.wall_s - self.ready_s[0]
        return rows / seconds * self.ready_s[0] / self.first_rows if rows > 0 and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What every run does: the rows of each token, and what computing is stated to take."""

    rows: Int64  # [tokens, rows a token]
    reads_per_token: float
    compute_token_s: float
    compute: Callable[[float], object]  # takes so many seconds

    def ubatches(self, cuts: Sequence[int]) -> list[Int64]:
        """Row ids of each ubatch."""
        return np.split(self.rows, np.cumsum(cuts)[:-1])

    def pace(self, limit_reads_per_s: float) -> Pace:
        """Both stages at a limit of the device, with nothing but what is stated and measured."""
        return Pace(self.reads_per_token / limit_reads_per_s, self.compute_token_s)


@dataclass(slots=True)
class PipelineOutcome:
    """Everything that was measured so far; `complete` if that is all."""

    spec: TableSpec
    workload: Workload
    arm: Arm
    backend: str
    prompt: Prompt
    spin: bool
    limit: DeviceLimit
    cuts: dict[str, list[int]]  # by way
    runs: list[PipelineRun]
    complete: bool = False

    @property
    def ways(self) -> list[str]:
        """Those that were measured, in the order of WAYS."""
        return [way for way in WAYS if any(run.way == way for run in self.runs)]

    def counted(self, way: str) -> list[PipelineRun]:
        """The runs of a way beside a steady device, or all of them where it never was."""
        runs = [run for run in self.runs if run.way == way]
        return [run for run in runs if run.steady] or runs

    def median(self, way: str, name: str) -> float:
        """Of one figure, over the runs that count."""
        return float(statistics.median(getattr(run, name) for run in self.counted(way)))

    @property
    def verify(self) -> int:
        """How many rows of every gather and ticket were read once more and compared."""
        count: int = settings.resolve("verify", self.arm.settings.get("verify"))
        return count

    def as_json(self) -> dict[str, Any]:
        """The form that is written to a file."""
        return {
            "table": self.spec.path,
            "complete": self.complete,
            "workload": self.workload.as_json(),
            "mode": self.arm.mode,
            "backend_used": self.backend,
            "compute_us_per_token": 1e6 * self.prompt.compute_token_s,
            "compute_by": "spinning" if self.spin else "sleeping",
            "reads_per_token": self.prompt.reads_per_token,
            "verify": self.verify,
            "device_limit": self.limit.as_json(),
            "cuts": self.cuts,
            "runs": [asdict(run) for run in self.runs],
        }


def gather_then_compute(table: LazyTable, ubatches: Sequence[Int64]) -> Iterator[tuple[Bytes, Int64]]:
    """Ask for the rows of a ubatch when it is its turn."""
    return (table.gather_unique(ids) for ids in ubatches)


GATHER, FIXED, PLANNED = "gather, then compute", "lookahead, fixed cuts", "lookahead, planned cuts"
WAYS: dict[str, Way] = {GATHER: gather_then_compute, FIXED: Lookahead, PLANNED: Lookahead}


def spin(seconds: float) -> None:
    """Keep the interpreter busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def execute_pipeline(
    request: Request, console: Console, keep: Callable[[PipelineOutcome], None] = lambda _: None
) -> PipelineOutcome:
    """Measure what is asked for; `keep` has what there is after each run.

    Raises SettingError for a request that can't be, NotCold, RunsDifferError, and what tables raise.
    """
    request.check()
    if "," in request.modes and request.modes != DEFAULT_MODES:
        raise SettingError(f"--pipeline orders the reads of one mode: --modes is {request.modes!r}, name one")
    arm = request.arms()[1]  # of the usual modes, the last
    spec = table_of(request, console)
    workload = request.workload(spec)
    limit = DeviceLimit(
        spec,
        workload,
        block_bytes=settings.resolve("block_bytes", request.block_bytes),
        reads=request.limit_reads or DEFAULT_LIMIT_READS,
        seed=request.seed,
        strict=request.strict,
    )
    compute_token_s = 1e-6 * (request.compute_us_per_token or 0)
    with Watch(console, request.rounds * len(WAYS)) as watch:
        watch.begin(f"device limit: the best queue depth of {DEPTHS[0]} to {DEPTHS[-1]}")
        limit.choose_depth()
        pipeline = Pipeline(spec, workload, arm, limit, request)
        return pipeline.measure(request.rounds, compute_token_s, request.spin, watch, keep)


class Pipeline:
    """Measures the ways in rounds, a measurement of the device's limit between any two runs."""

    def __init__(self, spec: TableSpec, workload: Workload, arm: Arm, limit: DeviceLimit, request: Request) -> None:
        assert workload.tokens is not None  # a trace, whose tokens are not known, is refused beforehand
        assert workload.ubatch_tokens is not None
        self._spec, self._workload, self._arm, self._limit = spec, workload, arm, limit
        self._strict = request.strict or None
        whole = replace(workload, ubatches=(np.concatenate(workload.ubatches),))
        self._rows = whole.ubatches[0].reshape(workload.tokens, -1)
        self._ubatch = workload.ubatch_tokens
        self._windows_a_row = limit.windows / workload.unique_rows
        self._verifier = Verifier(spec, whole, request.seed)

    def measure(
        self, rounds: int, compute_token_s: float, spins: bool, watch: Watch, keep: Callable[[PipelineOutcome], None]
    ) -> PipelineOutcome:
        """Run every way once a round, in reversed order every other round."""
        compute = spin if spins else time.sleep
        prompt = Prompt(self._rows, self._limit.windows / len(self._rows), compute_token_s, compute)
        before = self._mark(watch)
        cuts = self._cuts(prompt, before.rate)
        with self._open() as table:
            backend = table.backend.fetcher
        outcome = PipelineOutcome(
            self._spec, self._workload, self._arm, backend, prompt, spins, self._limit, cuts, list[PipelineRun]()
        )
        for number in range(rounds):
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                watch.begin(f"round {number + 1} of {rounds}: {way}")
                measured = self._run(way, prompt, cuts[way])
                after = self._mark(watch)
                run = self._judge(way, number, prompt, cuts[PLANNED], measured, (before, after))
                outcome.runs.append(run)
                keep(outcome)
                watch.done(f"round {number + 1} of {rounds}: {way} {1e3 * run.wall_s:,.0f} ms")
                before = after
        outcome.complete = True
        return outcome

    def _open(self) -> LazyTable:
        return open_table(self._spec, mode=self._arm.mode, strict=self._strict, **without_cache(self._arm))

    def _mark(self, watch: Watch) -> Mark:
        watch.begin("device limit")
        return self._limit.run()

    def _cuts(self, prompt: Prompt, limit_reads_per_s: float) -> dict[str, list[int]]:
        tokens, rate = len(prompt.rows), 1 / prompt.compute_token_s
        fixed = fixed_cuts(tokens, self._ubatch)
        planned = plan_cuts(tokens, prompt.reads_per_token, limit_reads_per_s, rate, self._ubatch)
        return {GATHER: fixed, FIXED: fixed, PLANNED: planned}

    def _run(self, way: str, prompt: Prompt, cuts: list[int]) -> Measured:
        make_cold(self._spec)
        ubatches, kept = prompt.ubatches(cuts), list[tuple[Bytes, Int64]]()
        ready, computed, computing_cpu_s = list[float](), list[float](), 0.0
        with self._open() as table:
            start, cpu = time.perf_counter(), time.process_time()
            for tokens, result in zip(cuts, WAYS[way](table, ubatches), strict=True):
                ready.append(time.perf_counter() - start)
                before = time.thread_time()
                prompt.compute(tokens * prompt.compute_token_s)
                computing_cpu_s += time.thread_time() - before
                computed.append(time.perf_counter() - start)
                kept.append(result)
            cpu, stats = time.process_time() - cpu, table.stats()
        rows = np.concatenate([unique[inverse.reshape(-1)] for unique, inverse in kept])
        self._verifier.check(way, 0, rows)
        return Measured(ready, computed, len(kept[0][0]), stats, cpu, computing_cpu_s)

    def _judge(
        self, way: str, number: int, prompt: Prompt, planned: list[int], measured: Measured, marks: tuple[Mark, Mark]
    ) -> PipelineRun:
        rates, in_flight = [mark.rate for mark in marks], [mark.in_flight for mark in marks if mark.in_flight]
        limit, wall = sum(rates) / 2, measured.computed_s[-1]
        pace = prompt.pace(limit)
        reads_s, computes_s = pace.reads_s(planned), pace.computes_s(planned)
        pipelined = measured.pipelined(
            measured.stats.unique_rows * self._windows_a_row,
            limit,
            statistics.fmean(in_flight) if in_flight else None,
            ahead=WAYS[way] is Lookahead,
        )
        bound = bound_of_pipeline(pipelined, len(os.sched_getaffinity(0)))
        return PipelineRun(
            way,
            number,
            wall,
            tuple(measured.ready_s),
            tuple(measured.computed_s),
            limit,
            max(rates) <= STEADY_WITHIN * min(rates),
            wall / makespan_s(reads_s, computes_s),
            wall / max(sum(reads_s), sum(computes_s)),
            pipelined.reading.wall_s,
            pipelined.reading.cpu_s,
            bound.by,
            bound.reason,
        )
