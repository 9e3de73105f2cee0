"""Decode steps in rounds of all modes: how long each waited for its rows, and what the device allows.

Steps are teacher-forced with real text, since greedy text of random weights repeats itself, and then a cache has
everything. There is no row cache, so that each step's rows are read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lazyio.bench.limit import DeviceLimit
from lazyio.bench.turns import in_turn
from lazyio.bench.watch import Watch
from lazyio.bench.workload import Workload
from lazyio.engine.bench.rig import DecodeRun, Rig
from lazyio.engine.bench.rounds import Rounds
from lazyio.engine.bench.ways import Way


@dataclass(frozen=True, slots=True)
class Steps:
    """One run and its place."""

    way: Way
    again: bool
    run: DecodeRun

    @property
    def waits_us(self) -> tuple[float, float]:
        """How long a step waited for its rows, p50 and p99."""
        p50, p99 = 1e6 * np.percentile(self.run.waits_s, [50, 99])
        return float(p50), float(p99)


@dataclass(slots=True)
class DecodeOutcome(Rounds[Steps]):
    """All rounds. `raw_us` has the p50 of one step's reads on a bare queue, measured before, between and after runs."""

    ways: list[Way]  # one a mode
    context: int
    steps: int
    raw_us: list[float] = field(default_factory=list)

    @property
    def raw_p50_us(self) -> float:
        """The median over all measurements."""
        return statistics.median(self.raw_us)

    def of(self, way: Way, *, again: bool = False) -> list[Steps]:
        """The runs of a way, one a round."""
        return [steps for steps in self.runs() if steps.way == way and steps.again is again]

    def least_us(self, steps: Steps) -> float:
        """What a step must wait at least: the raw p50 less what passes before the rows are needed."""
        return max(0.0, self.raw_p50_us - 1e6 * statistics.median(steps.run.to_table_s))


def measure_decode(
    rig: Rig,
    ways: list[Way],
    tokens: Sequence[int],
    context: int,
    rounds: int,
    seed: int,
    watch: Watch,
    keep: Callable[[DecodeOutcome], None],
) -> None:
    """All rounds over tokens[context:], one step each; `keep` has what there is after each run.

    Raises NotCold, RunsDifferError, and what tables raise.
    """
    outcome = DecodeOutcome(ways, context, len(tokens) - context)
    asked = rig.row_ids(np.asarray(tokens))[context:]
    workload = Workload(tuple(asked), "the rows of each step", len(asked), 1, decode=True)
    limit = DeviceLimit(rig.spec, workload, block_bytes=0, reads=1, seed=seed, strict=False)
    rig.decode(ways[0], tokens, context)
    for number in range(rounds):
        turns = in_turn(ways, ways[0], number)
        _mark(limit, outcome)
        for way, again in turns:
            watch.begin(f"decode, round {number + 1} of {rounds}: {way.mode}")
            steps = Steps(way, again, rig.decode(way, tokens, context))
            _mark(limit, outcome)
            outcome.add(steps, len(turns))
            watch.note(f"decode, {way.mode}: waited {steps.waits_us[0]:,.0f} us a step")
            keep(outcome)


def _mark(limit: DeviceLimit, outcome: DecodeOutcome) -> None:
    p50_us = limit.run().p50_us
    assert p50_us is not None
    outcome.raw_us.append(p50_us)
