"""Prompts in rounds of all ways, each beside the device's limit, and judged by what limit and trunk allow.

The least time that a cold prompt can take is that of a pipeline of two stages: ubatch i is computed when the reads of
ubatches 1 to i are done, at the device's limit, and ubatch i-1 is computed. What a ubatch takes to compute is measured
in the same round, with the table in memory. That time is T*.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lazyio.bench.limit import DeviceLimit
from lazyio.bench.rounds import STEADY_WITHIN
from lazyio.bench.turns import in_turn
from lazyio.bench.watch import Watch
from lazyio.bench.workload import Workload
from lazyio.engine.bench.rig import PromptRun, Rig
from lazyio.engine.bench.rounds import Rounds
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
    floor_s: float = 0.0  # T*; 0 while nothing has been measured with the table in memory in the same round

    @property
    def steady(self) -> bool:
        """Whether the device was the same before and after."""
        return self.limits is None or max(self.limits) <= STEADY_WITHIN * min(self.limits)


@dataclass(slots=True)
class PromptOutcome(Rounds[Timed]):
    """All rounds of one prompt at one temperature."""

    tokens: int
    cuts: list[int]
    warm: bool
    reads: list[int]  # of each ubatch, at least
    repeats: int = 0

    def add(self, run: Timed, turns: int) -> None:
        """See `Rounds`. A round beside a device that was not the same before and after a run is dropped, unless that
        has come about too often."""
        self.unfinished = with_floors([*self.unfinished, run], self.reads)
        if len(self.unfinished) < turns:
            return
        if all(timed.steady for timed in self.unfinished) or self.repeats >= _MOST_REPEATS:
            self.rounds.append(self.unfinished)
        else:
            self.repeats += 1
        self.unfinished = []

    def of(self, way: Way, *, again: bool = False) -> list[Timed]:
        """The runs of a way, one a round."""
        return [timed for timed in self.runs() if timed.way == way and timed.again is again]

    def times_off(self, timed: Timed) -> list[float]:
        """Its T over that of the first run with the table in memory in the same round; none where there is no such."""
        turns = next(turns for turns in (*self.rounds, self.unfinished) if any(timed is run for run in turns))
        resident = [run for run in turns if run.way.mode == RESIDENT and not run.again]
        return [timed.run.wall_s / run.run.wall_s for run in resident]


class PromptBench:
    """Measures prompts that begin with the same tokens."""

    def __init__(self, rig: Rig, ways: list[Way], rounds: int, seed: int) -> None:
        self._rig, self._ways, self._rounds, self._seed = rig, ways, rounds, seed
        self._depth: int | None = None  # of the device's queue, once it is chosen

    def measure(
        self,
        tokens: Sequence[int],
        cuts: list[int],
        *,
        warm: bool,
        watch: Watch,
        keep: Callable[[PromptOutcome], None],
    ) -> None:
        """All rounds; `keep` has what there is after each run. Raises NotCold, RunsDifferError, what tables raise."""
        new = new_rows(self._rig.row_ids(np.asarray(tokens)), cuts)
        limit = self._limit(new, len(tokens))
        outcome = PromptOutcome(len(tokens), cuts, warm, limit.windows_of)
        if not warm:
            self._set_depth(limit, watch)
        self._rig.prompt(self._ways[0], tokens, cuts, warm=warm)  # libraries choose and compile their kernels
        for number in range(self._rounds):
            while True:
                self._round(number, tokens, outcome, None if warm else limit, watch, keep)
                if len(outcome.rounds) > number:
                    break
                watch.note("the round is run again: the device was not the same before and after a run")

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
        self,
        number: int,
        tokens: Sequence[int],
        outcome: PromptOutcome,
        limit: DeviceLimit | None,
        watch: Watch,
        keep: Callable[[PromptOutcome], None],
    ) -> None:
        """Run every way once. There is one round more then, unless it does not stand."""
        turns = in_turn(self._ways, self._ways[0], number)
        before = None if limit is None else limit.run().rate
        for way, again in turns:
            watch.begin(f"{len(tokens):,} tokens, round {number + 1} of {self._rounds}: {way.label}")
            run = self._rig.prompt(way, tokens, outcome.cuts, warm=outcome.warm)
            after = None if limit is None else limit.run().rate
            limits = None if before is None or after is None else (before, after)
            watch.note(f"{len(tokens):,} tokens, {way.label}: {1e3 * run.wall_s:,.0f} ms")
            outcome.add(Timed(way, again, run, limits), len(turns))
            keep(outcome)
            before = after


def with_floors(turns: list[Timed], reads: Sequence[int]) -> list[Timed]:
    """The runs of a round with their T*: computing as long as it took with the table in memory in the same round.

    They have none before the first of these.
    """
    resident = [timed.run.computes_s for timed in turns if timed.way.mode == RESIDENT]
    if not resident:
        return turns
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
