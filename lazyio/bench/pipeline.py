"""How much of a prompt's reading hides behind its computing: three ways to order the two, on one table, cold.

Computing is stated, so many microseconds a token, and simulated: by sleeping, as a thread does that waits for a GPU, or
by a loop that keeps the interpreter, as one does that launches many small kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from lazyio import settings
from lazyio.bench.arms import without_cache
from lazyio.bench.cold import make_cold
from lazyio.bench.equal import Verifier
from lazyio.bench.limit import DEPTHS, DeviceLimit
from lazyio.bench.options import DEFAULT_LIMIT_READS, DEFAULT_MODES, Request
from lazyio.bench.rounds import STEADY_WITHIN
from lazyio.bench.runs import Arm
from lazyio.bench.session import table_of
from lazyio.bench.watch import Watch
from lazyio.bench.workload import Workload
from lazyio.errors import SettingError
from lazyio.fetchers.base import Bytes, Int64
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
    """Everything that was measured."""

    spec: TableSpec
    workload: Workload
    arm: Arm
    backend: str
    prompt: Prompt
    spin: bool
    limit: DeviceLimit
    cuts: dict[str, list[int]]  # by way
    runs: list[PipelineRun]

    def counted(self, way: str) -> list[PipelineRun]:
        """The runs of a way beside a steady device, or all of them where it never was."""
        runs = [run for run in self.runs if run.way == way]
        return [run for run in runs if run.steady] or runs

    def median(self, way: str, name: str) -> float:
        """Of one figure, over the runs that count."""
        return float(statistics.median(getattr(run, name) for run in self.counted(way)))

    def as_json(self) -> dict[str, Any]:
        """The form that is written to a file."""
        return {
            "table": self.spec.path,
            "workload": self.workload.as_json(),
            "mode": self.arm.mode,
            "backend_used": self.backend,
            "compute_us_per_token": 1e6 * self.prompt.compute_token_s,
            "compute_by": "spinning" if self.spin else "sleeping",
            "reads_per_token": self.prompt.reads_per_token,
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


def execute_pipeline(request: Request, console: Console) -> PipelineOutcome:
    """Measure what is asked for. Raises SettingError for a request that can't be, NotCold, RunsDifferError, and what
    tables raise."""
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
        return pipeline.measure(request.rounds, compute_token_s, request.spin, watch)


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
        self._verifier = Verifier(spec, whole, request.seed)

    def measure(self, rounds: int, compute_token_s: float, spins: bool, watch: Watch) -> PipelineOutcome:
        """Run every way once a round, in reversed order every other round."""
        compute = spin if spins else time.sleep
        prompt = Prompt(self._rows, self._limit.windows / len(self._rows), compute_token_s, compute)
        before = self._mark(watch)
        cuts = self._cuts(prompt, before)
        with self._open() as table:
            backend = table.backend.fetcher
        outcome = PipelineOutcome(
            self._spec, self._workload, self._arm, backend, prompt, spins, self._limit, cuts, list[PipelineRun]()
        )
        for number in range(rounds):
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                watch.begin(f"round {number + 1} of {rounds}: {way}")
                ready, computed = self._run(way, prompt, cuts[way])
                after = self._mark(watch)
                outcome.runs.append(_judge(way, number, prompt, cuts, ready, computed, before, after))
                watch.done(f"round {number + 1} of {rounds}: {way} {1e3 * computed[-1]:,.0f} ms")
                before = after
        return outcome

    def _open(self) -> LazyTable:
        return open_table(self._spec, mode=self._arm.mode, strict=self._strict, **without_cache(self._arm))

    def _mark(self, watch: Watch) -> float:
        watch.begin("device limit")
        return self._limit.run().rate

    def _cuts(self, prompt: Prompt, limit_reads_per_s: float) -> dict[str, list[int]]:
        tokens, rate = len(prompt.rows), 1 / prompt.compute_token_s
        fixed = fixed_cuts(tokens, self._ubatch)
        planned = plan_cuts(tokens, prompt.reads_per_token, limit_reads_per_s, rate, self._ubatch)
        return {GATHER: fixed, FIXED: fixed, PLANNED: planned}

    def _run(self, way: str, prompt: Prompt, cuts: list[int]) -> tuple[list[float], list[float]]:
        """When the rows of each ubatch were there, and when it was computed."""
        make_cold(self._spec)
        ubatches, kept = prompt.ubatches(cuts), list[tuple[Bytes, Int64]]()
        ready, computed = list[float](), list[float]()
        with self._open() as table:
            start = time.perf_counter()
            for tokens, result in zip(cuts, WAYS[way](table, ubatches), strict=True):
                ready.append(time.perf_counter() - start)
                prompt.compute(tokens * prompt.compute_token_s)
                computed.append(time.perf_counter() - start)
                kept.append(result)
        rows = np.concatenate([unique[inverse.reshape(-1)] for unique, inverse in kept])
        self._verifier.check(way, 0, rows)
        return ready, computed


def _judge(
    way: str,
    number: int,
    prompt: Prompt,
    cuts: dict[str, list[int]],
    ready: list[float],
    computed: list[float],
    before: float,
    after: float,
) -> PipelineRun:
    limit, wall = (before + after) / 2, computed[-1]
    pace = prompt.pace(limit)
    reads_s, computes_s = pace.reads_s(cuts[PLANNED]), pace.computes_s(cuts[PLANNED])
    return PipelineRun(
        way,
        number,
        wall,
        tuple(ready),
        tuple(computed),
        limit,
        max(before, after) <= STEADY_WITHIN * min(before, after),
        wall / makespan_s(reads_s, computes_s),
        wall / max(sum(reads_s), sum(computes_s)),
    )
