"""Requests that wait for the one lane: how long their prompts then stand still for rows.

All come at once. Each is a prompt of a real text and a reply that follows it, so that those behind wait for as long as
these take. Their first rows are read meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from lazyio import settings
from lazyio.bench.turns import in_turn
from lazyio.bench.watch import Watch
from lazyio.engine.admission import Windows
from lazyio.engine.bench.rig import Rig
from lazyio.engine.bench.rounds import Rounds
from lazyio.engine.bench.streams import Summed, requests_of, step
from lazyio.engine.bench.ways import Way
from lazyio.engine.planning import Limits
from lazyio.engine.scheduler import Scheduler
from lazyio.gate import TableStats
from lazyio.modes import Backend


@dataclass(frozen=True, slots=True)
class QueueRun:
    """One request under way and `queued` behind it. Of these, in their order: seconds in the queue, and then for rows.

    `first_waited_s` is what the first one, which had no queue to wait in, stood still for rows.
    """

    way: Way
    queued: int
    again: bool
    queued_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    first_waited_s: float
    stats: TableStats
    backend: Backend
    logits: str  # a digest of the checksums of all logits

    @property
    def waited_ms(self) -> float:
        """What one of the queued waited for rows, on average."""
        return 1e3 * statistics.fmean(self.waited_s)

    def __str__(self) -> str:
        return (
            f"first in the queue {self.queued_s[0]:,.3f} s, the queued waited {self.waited_ms:,.1f} ms each, "
            f"{1e3 * max(self.waited_s):,.1f} ms at most, who had no queue {1e3 * self.first_waited_s:,.1f} ms"
        )


@dataclass(slots=True)
class QueueOutcome(Rounds[QueueRun]):
    """All rounds."""

    arms: list[tuple[int, Way]]
    context: int
    steps: int
    limits: Limits

    @property
    def tokens_each(self) -> int:
        """Of the text that a request follows. The last one of a reply is chosen and not computed."""
        return self.context + self.steps + 1

    @property
    def most_tokens(self) -> int:
        """Of the texts of all requests together."""
        return max((self.tokens_each * (queued + 1) for queued, _ in self.arms), default=0)

    def of(self, arm: tuple[int, Way], *, again: bool = False) -> list[QueueRun]:
        """The runs of an arm, one a round."""
        return [run for run in self.runs() if (run.queued, run.way, run.again) == (*arm, again)]


def measure_queue(
    rig: Rig,
    outcome: QueueOutcome,
    tokens: Sequence[int],
    rounds: int,
    watch: Watch,
    keep: Callable[[QueueOutcome], None],
) -> None:
    """All rounds over parts of `tokens`, one for each request; `keep` has what there is after each run.

    Raises NotCold, RunsDifferError, what tables raise.
    """
    _run(rig, outcome, outcome.arms[0], tokens, again=False)  # libraries choose and compile their kernels
    for number in range(rounds):
        turns = in_turn(outcome.arms, outcome.arms[0], number)
        for arm, again in turns:
            label = f"{arm[0]} queued, {arm[1].label}"
            watch.begin(f"{label}, round {number + 1} of {rounds}")
            run = _run(rig, outcome, arm, tokens, again=again)
            outcome.add(run, len(turns))
            watch.note(f"{label}: {run}")
            keep(outcome)


def _run(rig: Rig, outcome: QueueOutcome, arm: tuple[int, Way], tokens: Sequence[int], *, again: bool) -> QueueRun:
    queued, way = arm
    rig.make_cold(way)
    without_cache = {"row_cache": 0} if settings.applies("row_cache", way.mode) else {}
    with rig.feed(way, without_cache, timed=True) as feed:
        each, context = outcome.tokens_each, outcome.context
        requests, forward = requests_of(rig, outcome.limits, feed, tokens, queued + 1, each, context), Summed(rig.model)
        before = feed.table.stats()
        with closing(Scheduler(forward, feed, Windows(rig.model, 1), outcome.limits, 1)) as scheduler:
            for request in requests:
                scheduler.add(request)
            while not all(request.ended for request in requests):
                step(scheduler, requests)
        accounts = [request.meter.account(outcome.steps) for request in requests]
        stats, backend = feed.table.stats() - before, feed.table.backend
    what = f"{queued} queued requests of {context} tokens and {outcome.steps} steps"
    logits = rig.checked(what, way.label, forward.sums)
    queued_s = tuple(account.queued_s for account in accounts[1:])
    waited_s = tuple(account.prompt_waited_s for account in accounts)
    return QueueRun(way, queued, again, queued_s, waited_s[1:], waited_s[0], stats, backend, logits)
