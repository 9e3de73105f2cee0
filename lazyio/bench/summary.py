"""From runs to the few numbers that are compared: medians with their range, and ratios paired within a round."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lazyio.bench.runs import Run


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of a number over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of those values that there are; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


@dataclass(frozen=True, slots=True)
class Paired:
    """How many times as fast one arm is as another, from pairs of runs of the same round."""

    median: float
    low: float
    high: float
    mean: float
    two_se: float | None  # twice the standard error of the mean; None for a single pair
    slower: int  # rounds in which it was the slower one
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Paired | None:
        """Of one ratio a round; None if there are none."""
        if not ratios:
            return None
        count = len(ratios)
        two_se = 2 * statistics.stdev(ratios) / count**0.5 if count > 1 else None
        slower = sum(ratio < 1 for ratio in ratios)
        return cls(statistics.median(ratios), min(ratios), max(ratios), statistics.fmean(ratios), two_se, slower, count)


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over the rounds of a section."""

    arm: str
    mode: str
    backend_used: str
    fallback_reason: str | None
    direct_io: bool
    workers: int
    ratio_to_device_limit: Spread | None
    ratio_to_take: Spread | None
    rows_per_s: Spread | None
    rows_per_cpu_s: Spread | None
    user_us_per_row: Spread | None
    p50_us: Spread | None
    p99_us: Spread | None
    p50_over_limit: Spread | None
    bound_by: str | None  # the word of most runs
    bound_reason: str | None  # of the last of those
    speedup_over: dict[str, Paired]  # by the other arm's label


@dataclass(frozen=True, slots=True)
class SectionSummary:
    """All arms at one temperature.

    `counted_rounds` 0 means that no round met the conditions; the numbers are then those of the rounds that did not.
    `rounds` 0 means that none is complete, and numbers are those of the one that was broken off.
    """

    temperature: str
    rounds: int
    counted_rounds: int
    noise: Paired | None  # the arm that ran twice, second run over first
    twice: str
    arms: tuple[ArmSummary, ...]


def summarise(
    temperature: str, runs: Sequence[Run], labels: Sequence[str], twice: str, unfinished: Sequence[Run] = ()
) -> SectionSummary:
    """Sum up the runs of one section; `labels` are its arms in the order they were named, as far as they have runs.

    `unfinished` are those of a round that was broken off, which tell where no round is complete.
    """
    whole = _complete(runs, len(labels) + 1)
    counted = [run for run in whole if run.counted]
    used = counted or whole or unfinished
    firsts = {label: [run for run in used if run.arm == label and not run.again] for label in labels}
    noise = Paired.of(_ratios([run for run in used if run.again], firsts[twice]))
    arms = tuple(_arm(label, firsts) for label in labels if firsts[label])
    rounds = len({run.round for run in whole})
    return SectionSummary(temperature, rounds, len({run.round for run in counted}), noise, twice, arms)


def _complete(runs: Sequence[Run], turns: int) -> list[Run]:
    """Leave out attempts that were broken off: only the last attempt of a round has all its turns."""
    last: dict[int, list[Run]] = {}
    for run in runs:
        last.setdefault(run.round, []).append(run)
    return [run for of_round in last.values() if len(of_round) >= turns for run in of_round[-turns:]]


def _arm(label: str, firsts: dict[str, list[Run]]) -> ArmSummary:
    runs = firsts[label]
    first = runs[0]

    def over(value: Callable[[Run], float | None]) -> Spread | None:
        return Spread.of(value(run) for run in runs)

    words = Counter(run.bound_by for run in runs)
    typical = max(runs, key=lambda run: (words[run.bound_by], run.round))
    return ArmSummary(
        arm=label,
        mode=first.mode,
        backend_used=first.backend_used,
        fallback_reason=first.fallback_reason,
        direct_io=first.direct_io,
        workers=first.workers,
        ratio_to_device_limit=over(lambda run: run.ratio_to_device_limit),
        ratio_to_take=over(lambda run: run.ratio_to_take),
        rows_per_s=over(lambda run: run.rows_per_s),
        rows_per_cpu_s=over(lambda run: run.rows_per_cpu_s),
        user_us_per_row=over(lambda run: 1e6 * run.user_s / run.rows),
        p50_us=over(lambda run: run.p50_us),
        p99_us=over(lambda run: run.p99_us),
        p50_over_limit=over(lambda run: run.p50_over_limit),
        bound_by=typical.bound_by,
        bound_reason=typical.bound_reason,
        speedup_over={
            other: pairs
            for other, others in firsts.items()
            if other != label and (pairs := Paired.of(_ratios(runs, others)))
        },
    )


def _ratios(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    """Rows a second of each run over that of the other arm in the same round."""
    by_round = {other.round: other.rows_per_s for other in others}
    return [run.rows_per_s / by_round[run.round] for run in runs if run.round in by_round]
