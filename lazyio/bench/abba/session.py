"""Measuring: cell by cell, round by round, each run in a process of its own."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from lazyio.bench.abba import machine
from lazyio.bench.abba.journal import CellRecord, Journal, Run
from lazyio.bench.abba.judge import disagreement
from lazyio.bench.abba.plan import ColdTable, Job, Metric, Plan
from lazyio.bench.abba.process import GRACE_S, ask, do
from lazyio.bench.cold import make_cold
from lazyio.bench.turns import in_turn
from lazyio.bench.watch import Watch
from lazyio.errors import LazyIOError, NeverFits, RunFailed
from lazyio.ple.tables import find_table

#: What the harness knows of a run, under this key beside what its command gave.
PROCESS = "process"
_LONGEST_TEXT = 64


def runs_left(plan: Plan, journal: Journal) -> int:
    """How many runs are to be measured yet."""
    rounds = sum(plan.rounds - len(record.rounds) for record in journal.cells.values() if record.void is None)
    return rounds * (len(plan.arms) + 1)


class Session:
    """One sitting over a journal: it measures what is not there yet, for as long as it may."""

    def __init__(self, plan: Plan, journal: Journal, watch: Watch, budget_s: float | None = None) -> None:
        self._plan, self._journal, self._watch = plan, journal, watch
        self._budget_s = math.inf if budget_s is None else budget_s
        self._deadline = time.monotonic() + self._budget_s

    def execute(self) -> bool:
        """Measure; whether all was tried, so that only cells that failed are not complete.

        A cell whose command fails, whose table is not cold, or the like, is noted as failed and the next one begun.
        Raises NeverFits where the budget ends before the first round does, OSError where the journal can't be written.
        """
        if not runs_left(self._plan, self._journal):
            return True
        self._journal.begin(machine.description(), _now())
        done = 0
        try:
            for cell in self._plan.cells:
                record = self._journal.cells[cell]
                while record.void is None and record.failed is None and len(record.rounds) < self._plan.rounds:
                    self._round(cell, record)
                    done += 1
        except _BudgetEnded as ended:
            if not done:
                raise NeverFits(
                    f"--budget-s {self._budget_s:g} does not hold one round of cell {cell}: {ended}; give more"
                ) from None
            self._watch.note(f"the budget of {self._budget_s:g} s ends: {ended}; the same command goes on from here")
            return False
        return True

    def _round(self, cell: str, record: CellRecord) -> None:
        """Run one round of a cell, or note why it can't be."""
        took = [sum(run.took_s for run in turns) for turns in record.rounds]
        if took and max(took) > self._left_s:
            raise _BudgetEnded(f"a round takes up to {max(took):,.1f} s")
        number = len(record.rounds)
        runs: list[Run] = []
        try:
            for arm, again in in_turn(self._plan.arms, self._plan.reference, number):
                where = f"{cell}, round {number + 1} of {self._plan.rounds}: {arm}{' (again)' if again else ''}"
                self._watch.begin(where)
                self._refuse_longer(arm, [*record.runs, *runs])
                runs.append(self._run(self._plan.jobs[cell][arm], arm, again))
                self._watch.done(f"{where} {_said(runs[-1])}")
                if reason := disagreement([*record.runs, *runs]):
                    self._journal.add_void(cell, reason)
                    self._watch.note(f"{cell} is void: {reason}")
                    return
        except LazyIOError as error:
            if self._left_s <= 0:
                raise _BudgetEnded(f"{arm} had not ended") from None
            self._journal.add_failed(cell, f"{arm}: {error}")
            self._watch.note(f"{cell} failed: {arm}: {error}")
            return
        self._journal.add_round(cell, runs)

    @property
    def _left_s(self) -> float:
        """Seconds that a command may still take, so that ending it keeps to the budget too."""
        return self._deadline - time.monotonic() - GRACE_S

    def _refuse_longer(self, arm: str, earlier: list[Run]) -> None:
        """Stop before a run that would not end in time, as far as earlier runs of the cell tell."""
        same = [run.took_s for run in earlier if run.arm == arm]
        longest = max(same or [run.took_s for run in earlier], default=0.0)
        if self._left_s <= longest:
            raise _BudgetEnded(f"{arm} takes up to {longest:,.1f} s")

    def _run(self, job: Job, arm: str, again: bool) -> Run:
        begun, started = time.monotonic(), _now()
        if job.before_each is not None:
            do(job.before_each, job.env, self._limit_s(), self._journal.lock)
        pages = None if job.cold is None else _make_cold(job.cold)
        before = machine.snapshot()
        answer = ask(job.command, job.env, self._limit_s(), self._journal.lock)
        after = machine.snapshot()
        document = _with_process(answer.document, {"wall_s": answer.wall_s})
        return Run(
            arm=arm,
            again=again,
            metrics={metric.name: figure(metric, document) for metric in self._plan.metrics},
            equal={str(place): _digest(place.values(document)) for place in self._plan.equal},
            wall_s=answer.wall_s,
            took_s=time.monotonic() - begun,
            started=started,
            cold_pages=pages,
            before=before,
            after=after,
        )

    def _limit_s(self) -> float | None:
        limit = min(self._left_s, self._plan.timeout_s or math.inf)
        return None if limit == math.inf else max(0.0, limit)


class _BudgetEnded(Exception):
    """The next step would overrun the budget; what is begun of a round is left."""


def figure(metric: Metric, document: Mapping[str, Any]) -> float:
    """The metric's value: the median of what is at its place. Raises RunFailed for what is no number, or not above 0
    where it is judged."""
    values = metric.place.values(document)
    if wrong := [value for value in values if type(value) not in (int, float) or not math.isfinite(value)]:
        raise RunFailed(f"{metric.name} is {json.dumps(wrong[0])[:80]} at {metric.place}, and should be a number")
    value = float(statistics.median(values))
    if metric.better is not None and value <= 0:
        raise RunFailed(
            f"{metric.name} is {value:g}, of which no ratio can be judged; what can be 0 is shown without `better`"
        )
    return value


def _with_process(document: dict[str, Any], process: dict[str, Any]) -> dict[str, Any]:
    if PROCESS in document:
        raise RunFailed(f"the command's document has the key {PROCESS!r}, which stands for what is known without it")
    return {**document, PROCESS: process}


def _digest(values: list[Any]) -> str:
    """A short text that is equal for equal values only: a text itself, or a digest."""
    value = values[0] if len(values) == 1 else values
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONGEST_TEXT else f"blake2b {blake2b(text.encode(), digest_size=16).hexdigest()}"


def _make_cold(table: ColdTable) -> int:
    return make_cold(find_table(table.model, table.tensor))


def _said(run: Run) -> str:
    figures = ", ".join(f"{name} {value:.6g}" for name, value in run.metrics.items())
    return f"{figures} ({run.took_s:,.1f} s)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
