"""Prompts in rounds of all ways, each beside the device's limit, and judged by what limit and trunk allow.

The least time that a cold prompt can take is that of a pipeline of two stages: ubatch i is computed when the reads of
ubatches 1 to i are done, at the device's limit, and ubatch i-1 is computed. What a ubatch takes to compute is measured
in the same round, with the table in memory. That time is T*.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lazyio.bench.limit import DeviceLimit
from lazyio.bench.rounds import STEADY_WITHIN
from lazyio.bench.turns import in_turn
from lazyio.bench.watch import Watch
from lazyio.bench.workload import Workload
from lazyio.engine.bench.rig import PromptRun, Rig
from lazyio.engine.bench.ways import RESIDENT, Way
from lazyio.fetchers.base import Int64
from lazyio.ple.cuts import makespan_s

_LIMIT_READS = 32_768
# Rounds beside an unsteady device are run again, so often in all.
_MOST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """One run and its place. Rates are those of the device, in reads a second, before and after it."""

    way: Way
    again: bool
    run: PromptRun
    limits: tuple[float, float] | None  # None where nothing was read from the device
    floor_s: float = 0.0  # T*

    @property
    def steady(self) -> bool:
        """Whether the device was the same before and after."""
        return self.limits is None or max(self.limits) <= STEADY_WITHIN * min(self.limits)


@dataclass(slots=True)
class PromptOutcome:
    """All rounds of one prompt at one temperature."""

    tokens: int
    cuts: list[int]
    warm: bool
    reads: list[int]  # of each ubatch, at least
    rounds: list[list[Timed]] = field(default_factory=list)
    repeats: int = 0

    def of(self, way: Way, *, again: bool = False) -> list[Timed]:
        """The runs of a way, one a round."""
        return [timed for turns in self.rounds for timed in turns if timed.way == way and timed.again is again]


class PromptBench:
    """Measures prompts that begin with the same tokens."""

    def __init__(self, rig: Rig, ways: list[Way], rounds: int, seed: int) -> None:
        self._rig, self._ways, self._rounds, self._seed = rig, ways, rounds, seed
        self._depth: int | None = None  # of the device's queue, once it is chosen

    def measure(self, tokens: Sequence[int], cuts: list[int], *, warm: bool, watch: Watch) -> PromptOutcome:
        """All rounds. Raises NotCold, RunsDifferError, and what tables raise."""
        new = new_rows(self._rig.row_ids(np.asarray(tokens)), cuts)
        limit = self._limit(new, len(tokens))
        outcome = PromptOutcome(len(tokens), cuts, warm, limit.windows_of)
        if not warm:
            self._set_depth(limit, watch)
        self._rig.prompt(self._ways[0], tokens, cuts, warm=warm)  # libraries choose and compile their kernels
        for number in range(self._rounds):
            while not self._round(number, tokens, outcome, None if warm else limit, watch):
                outcome.repeats += 1
                watch.note("the round is run again: the device was not the same before and after a run")
        return outcome

    def _set_depth(self, limit: DeviceLimit, watch: Watch) -> None:
        if self._depth is None:
            watch.begin("device limit: the best queue depth")
            limit.choose_depth()
            self._depth = limit.queue_depth
        limit.queue_depth = self._depth

    def _limit(self, new: list[Int64], tokens: int) -> DeviceLimit:
        workload = Workload(tuple(new), "the rows of the prompt, each once", tokens, None)
        return DeviceLimit(self._rig.spec, workload, block_bytes=0, reads=_LIMIT_READS, seed=self._seed, strict=False)

    def _round(
        self, number: int, tokens: Sequence[int], outcome: PromptOutcome, limit: DeviceLimit | None, watch: Watch
    ) -> bool:
        """Run every way once; whether the round stands."""
        turns = list[Timed]()
        before = None if limit is None else limit.run().rate
        for way, again in in_turn(self._ways, self._ways[0], number):
            watch.begin(f"{len(tokens):,} tokens, round {number + 1} of {self._rounds}: {way.label}")
            run = self._rig.prompt(way, tokens, outcome.cuts, warm=outcome.warm)
            after = None if limit is None else limit.run().rate
            limits = None if before is None or after is None else (before, after)
            turns.append(Timed(way, again, run, limits))
            watch.note(f"{len(tokens):,} tokens, {way.label}: {1e3 * run.wall_s:,.0f} ms")
            before = after
        stands = all(timed.steady for timed in turns) or outcome.repeats >= _MOST_REPEATS
        if stands:
            outcome.rounds.append(with_floors(turns, outcome.reads))
        return stands


def with_floors(turns: list[Timed], reads: Sequence[int]) -> list[Timed]:
    """The runs of a round with their T*: computing as long as it took with the table in memory in the same round."""
    resident = [timed.run.computes_s for timed in turns if timed.way.mode == RESIDENT]
    computes = [statistics.fmean(each) for each in zip(*resident, strict=True)]
    return [Timed(timed.way, timed.again, timed.run, timed.limits, _floor_s(timed, reads, computes)) for timed in turns]


def _floor_s(timed: Timed, reads: Sequence[int], computes: list[float]) -> float:
    if timed.limits is None or timed.way.mode == RESIDENT:
        return sum(computes)
    rate = statistics.fmean(timed.limits)
    return makespan_s([count / rate for count in reads], computes)


def new_rows(rows: Int64, cuts: Sequence[int]) -> list[Int64]:
    """Of rows [tokens, rows a token], those that each ubatch asks for and none before it did, ascending."""
    flat, first = np.unique(rows.reshape(-1), return_index=True)
    ends = np.cumsum(cuts) * rows.shape[1]
    ubatch = np.searchsorted(ends, first, side="right")
    return [flat[ubatch == number] for number in range(len(cuts))]
