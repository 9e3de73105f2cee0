"""Rounds: every arm once, one arm twice, a yardstick before, between and after them.

A disk is not the same disk a minute later, nor is a shared processor. So arms take turns within a round, each is judged
by the two measurements of the yardstick next to it, and a round in which those disagree, or in which the device gives
less than was asked for, is run again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lazyio.bench.bound import bound_of_run
from lazyio.bench.figures import ratio, short
from lazyio.bench.runs import Arm, Mark, Run, Yardstick
from lazyio.bench.summary import SectionSummary, summarise
from lazyio.bench.turns import in_turn
from lazyio.bench.watch import Watch

#: Measurements of a yardstick next to each other that differ by more than this factor make a round unsteady.
STEADY_WITHIN = 1.3


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's place in a round. `again` marks the second run of the arm that shows the noise."""

    arm: Arm
    again: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """How many rounds, and which of them count."""

    rounds: int
    max_repeats: int = 5  # over all rounds together
    min_iops: float = 0.0  # rounds in which the device gives fewer reads a second do not count
    pause_s: float = 60.0  # before a round that fell short of min_iops is run again


@dataclass(frozen=True, slots=True)
class Repeat:
    """A round that was run again, and why."""

    round: int
    reason: str


def order(arms: Sequence[Arm], twice: Arm, number: int) -> list[Turn]:
    """The turns of round `number`, counted from 0; `twice` is the arm that shows the noise."""
    return [Turn(arm, again) for arm, again in in_turn(arms, twice, number)]


class Section:
    """All rounds at one temperature, and what came of them."""

    def __init__(
        self,
        temperature: str,
        arms: Sequence[Arm],
        twice: Arm,
        rules: Rules,
        measure: Callable[[Arm], Run],
        yardstick: Yardstick | None,
    ) -> None:
        self.temperature, self.arms, self.twice, self.rules = temperature, arms, twice, rules
        self.runs: list[Run] = []
        self.unfinished: list[Run] = []  # of the round that is under way, or was broken off by an interrupt or an error
        self.repeats: list[Repeat] = []
        self._measure, self._yardstick = measure, yardstick
        self._cpus = len(os.sched_getaffinity(0))
        self._slow = False  # whether the yardstick last showed less than was asked for

    def execute(self, watch: Watch, keep: Callable[[], None] = lambda: None) -> None:
        """Run all rounds, repeating those that do not count while repeats are left; `keep` is called after each run."""
        for number in range(self.rules.rounds):
            while (reason := self._attempt(number, watch, keep)) is not None:
                self.repeats.append(Repeat(number, reason))
                watch.step_back(f"round {number + 1} is run again: {reason}")
                if self._slow:
                    time.sleep(self.rules.pause_s)

    def summary(self) -> SectionSummary:
        """Sum up what was run."""
        labels = [arm.label for arm in self.arms]
        return summarise(self.temperature, self.runs, labels, self.twice.label, self.unfinished)

    def _attempt(self, number: int, watch: Watch, keep: Callable[[], None]) -> str | None:
        """Run one round; the reason why it must be run again, or None when it stands.

        A round that will be run again is broken off at once: what it would still read is taken from the next one.
        """
        where = f"{self.temperature}, round {number + 1} of {self.rules.rounds}"
        may_repeat = len(self.repeats) < self.rules.max_repeats
        self.unfinished = runs = list[Run]()
        fault: str | None = None
        watch.mark()
        before = self._mark(where, watch)
        for turn in order(self.arms, self.twice, number):
            watch.begin(f"{where}: {turn.arm.label}")
            run = self._measure(turn.arm)
            run.round, run.again = number, turn.again
            after = self._mark(where, watch)
            if self._yardstick is not None and before is not None and after is not None:
                self._yardstick.compare(run, before, after)
                fault = fault or self._fault(self._yardstick, before, after)
            bound = bound_of_run(run, self._cpus)
            run.bound_by, run.bound_reason = bound.by, bound.reason
            runs.append(run)
            keep()
            watch.done(f"{where}: {_said(run)}")
            before = after
            if fault and may_repeat:
                break
        for run in runs:
            run.counted = fault is None
        self.runs += runs
        self.unfinished = []
        return fault if may_repeat else None

    def _mark(self, where: str, watch: Watch) -> Mark | None:
        if self._yardstick is None:
            return None
        watch.begin(f"{where}: {self._yardstick.name}")
        mark = self._yardstick.run()
        self._slow = mark.rate < self.rules.min_iops
        return mark

    def _fault(self, yardstick: Yardstick, before: Mark, after: Mark) -> str | None:
        slow, fast = sorted((before.rate, after.rate))
        if slow < self.rules.min_iops:
            return f"slow: {yardstick.name} {slow:,.0f} {yardstick.unit}, at least {self.rules.min_iops:,.0f} are asked"
        if fast > STEADY_WITHIN * slow:
            return f"unsteady: {yardstick.name} {slow:,.0f} and {fast:,.0f} {yardstick.unit} next to one run"
        return None


def _said(run: Run) -> str:
    beside = ""
    if run.ratio_to_device_limit is not None:
        beside = f", {ratio(run.ratio_to_device_limit)} of the device limit"
    if run.ratio_to_take is not None:
        beside = f", {ratio(run.ratio_to_take)} of np.take"
    return f"{run.arm}{' (again)' if run.again else ''} {short(run.rows_per_s)} rows/s{beside}"
