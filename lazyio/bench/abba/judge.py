"""From the runs of a cell to what is said of it: levels, paired ratios, noise, and whether an arm is slower.

Ratios are of runs of the same round, an arm over the first run of the reference, and say how many times as fast it is:
a rate over a rate, or the reference's time over its own. The noise is the same ratio for the reference's second run,
which would be 1 if nothing disturbed it. Its band is 1 plus and minus |mean - 1| + 2 standard errors. An arm is slower
where even its mean + 2 standard errors lies below the band, faster where its mean - 2 standard errors lies above it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lazyio.bench.abba.journal import CellRecord, Run
from lazyio.bench.abba.plan import Metric, Plan
from lazyio.bench.summary import Paired

SLOWER, FASTER, WITHIN = "slower", "faster", "in the noise"


@dataclass(frozen=True, slots=True)
class Level:
    """A number over rounds."""

    mean: float
    low: float
    high: float
    two_se: float | None  # twice the standard error of the mean; None for a single round

    @classmethod
    def of(cls, values: Sequence[float]) -> Level:
        """Of at least one value."""
        count = len(values)
        two_se = 2 * statistics.stdev(values) / count**0.5 if count > 1 else None
        return cls(statistics.fmean(values), min(values), max(values), two_se)


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm, or the reference's second run, in one metric of a cell."""

    arm: str
    again: bool
    level: Level
    times_as_fast: Paired | None  # as the reference; None for itself, and for a metric that is not judged
    verdict: str | None = None  # slower | faster | in the noise; None where nothing is judged
    seen_from: float | None = None  # a slow-down above this share would have been called one


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of a cell."""

    metric: Metric
    noise: float | None  # half the band; None where nothing is judged
    arms: tuple[ArmResult, ...]  # in their order, the reference's second run last


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell. Verdicts are there only if it is complete, figures only if it is not void."""

    cell: str
    rounds: int
    void: str | None
    failed: str | None
    complete: bool
    metrics: tuple[MetricResult, ...]

    @property
    def slower(self) -> list[tuple[Metric, ArmResult]]:
        """What is slower beyond the noise."""
        return [(each.metric, arm) for each in self.metrics for arm in each.arms if arm.verdict == SLOWER]


def judged(plan: Plan, cell: str, record: CellRecord) -> CellResult:
    """What is said of a cell."""
    complete = record.void is None and len(record.rounds) >= plan.rounds
    shown = record.rounds if record.void is None else []
    metrics = tuple(_metric(plan, metric, shown, complete) for metric in plan.metrics) if shown else ()
    return CellResult(cell, len(record.rounds), record.void, record.failed, complete, metrics)


def disagreement(runs: Sequence[Run]) -> str | None:
    """Which two runs differ in what must be equal, and how; None if they all agree."""
    for run in runs[1:]:
        for place, value in run.equal.items():
            first = runs[0].equal[place]
            if value != first:
                return f"{place} is {first} of {runs[0].label} and {value} of {run.label}"
    return None


def noise_of(again: Paired) -> float:
    """Half the width of the band around 1 that the reference's two runs show; infinite for a single pair."""
    return float("inf") if again.two_se is None else abs(again.mean - 1) + again.two_se


def verdict_of(paired: Paired, noise: float) -> str:
    """What the ratios of an arm say beside the noise."""
    two_se = float("inf") if paired.two_se is None else paired.two_se
    shift = paired.mean - 1
    if -shift - two_se > noise:
        return SLOWER
    return FASTER if shift - two_se > noise else WITHIN


def times_as_fast(metric: Metric, values: Sequence[float], reference: Sequence[float]) -> Paired | None:
    """Of two runs a round, in one that is judged; None otherwise."""
    if metric.better is None:
        return None
    pairs = zip(values, reference, strict=True)
    return Paired.of([mine / other if metric.better == "higher" else other / mine for mine, other in pairs])


def _metric(plan: Plan, metric: Metric, rounds: Sequence[Sequence[Run]], complete: bool) -> MetricResult:
    values: dict[tuple[str, bool], list[float]] = {}
    for turns in rounds:
        for run in turns:
            values.setdefault((run.arm, run.again), []).append(run.metrics[metric.name])
    reference = values[plan.reference, False]
    again = times_as_fast(metric, values[plan.reference, True], reference)
    noise = noise_of(again) if again is not None and complete else None
    order = [*((arm, False) for arm in plan.arms), (plan.reference, True)]
    return MetricResult(metric, noise, tuple(_arm(plan, metric, key, values[key], reference, noise) for key in order))


def _arm(
    plan: Plan,
    metric: Metric,
    key: tuple[str, bool],
    values: Sequence[float],
    reference: Sequence[float],
    noise: float | None,
) -> ArmResult:
    arm, again = key
    level = Level.of(values)
    if arm == plan.reference and not again:
        return ArmResult(arm, again, level, None)
    paired = times_as_fast(metric, values, reference)
    if paired is None or paired.two_se is None or noise is None or again:
        return ArmResult(arm, again, level, paired)
    return ArmResult(arm, again, level, paired, verdict_of(paired, noise), noise + paired.two_se)
