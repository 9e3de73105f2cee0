"""What was measured, as tables for people and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyio.bench.figures import ratio, short
from lazyio.engine.bench.decoding import DecodeOutcome, Steps
from lazyio.engine.bench.prompts import PromptOutcome, Timed
from lazyio.engine.bench.queueing import QueueOutcome, QueueRun
from lazyio.engine.bench.streams import StreamsOutcome, StreamsRun
from lazyio.engine.bench.ways import Way

T = TypeVar("T")
Part = PromptOutcome | StreamsOutcome | QueueOutcome | DecodeOutcome
#: What a column shows of the runs of an arm, by its name.
Columns = dict[str, Callable[[list[T]], str]]
_STOPPED = (
    "Stopped before the end: rounds is how often each was measured; T* and ratios are of runs in the same round, as "
    "far as it got."
)


@dataclass(slots=True)
class EngineOutcome:
    """Everything that was measured so far, with the words that say how it was had."""

    subject: str  # the model, its table, the device
    ways: list[Way]
    parts: list[Part]  # each has a run at least
    complete: bool = False  # whether that is all that was asked for

    @property
    def prompts(self) -> list[PromptOutcome]:
        """The parts that are prompts."""
        return [part for part in self.parts if isinstance(part, PromptOutcome)]

    @property
    def decode(self) -> DecodeOutcome | None:
        """The steps of one sequence."""
        return next((part for part in self.parts if isinstance(part, DecodeOutcome)), None)

    @property
    def streams(self) -> StreamsOutcome | None:
        """The steps of several at once."""
        return next((part for part in self.parts if isinstance(part, StreamsOutcome)), None)

    @property
    def queue(self) -> QueueOutcome | None:
        """The requests that waited for a lane."""
        return next((part for part in self.parts if isinstance(part, QueueOutcome)), None)

    def as_json(self) -> dict[str, Any]:
        """The form that is written to a file."""
        return {
            "subject": self.subject,
            "complete": self.complete,
            "prompts": [asdict(outcome) for outcome in self.prompts],
            "decode": None if self.decode is None else asdict(self.decode) | {"raw_p50_us": self.decode.raw_p50_us},
            "streams": None if self.streams is None else asdict(self.streams),
            "queue": None if self.queue is None else asdict(self.queue),
        }


def show_from(outcome: EngineOutcome, first: int, console: Console, *, whole: bool = True) -> int:
    """Print the parts from a number on, which are not `whole` if measuring was stopped; how many parts there are."""
    for part in outcome.parts[first:]:
        if isinstance(part, QueueOutcome):
            table = _queue_table(part, whole)
        elif isinstance(part, StreamsOutcome):
            table = _streams_table(part, whole)
        elif isinstance(part, DecodeOutcome):
            table = _decode_table(part, whole)
        else:
            table = _prompt_table(part, outcome.ways, whole)
        console.print(table)
    return len(outcome.parts)


def show_method(outcome: EngineOutcome, console: Console) -> None:
    """Print what the figures are, and how they were had."""
    for line in (outcome.subject, *_method(outcome)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _prompt_table(outcome: PromptOutcome, ways: Sequence[Way], whole: bool) -> Table:
    heat = "warm" if outcome.warm else "cold"
    cuts = f"{len(outcome.cuts)} ubatches of at most {max(outcome.cuts):,}" if len(outcome.cuts) > 1 else "one ubatch"
    table = _table(f"prompt of {outcome.tokens:,} tokens, {heat}, {cuts}: median [lowest, highest]", "mode +lookahead")
    columns: Columns[Timed] = {
        "T, ms": lambda runs: _spread([1e3 * timed.run.wall_s for timed in runs]),
        "T*, ms": lambda runs: _middle([1e3 * timed.floor_s for timed in runs if timed.floor_s]),
        "T / T*": lambda runs: _spread([timed.run.wall_s / timed.floor_s for timed in runs if timed.floor_s]),
        "times off": lambda runs: _spread([times for timed in runs for times in outcome.times_off(timed)]),
        "waited,\nms": lambda runs: _middle([1e3 * sum(timed.run.waits_s) for timed in runs]),
        "tokens/s": lambda runs: _middle([outcome.tokens / timed.run.wall_s for timed in runs]),
        "reads": lambda runs: _middle([timed.run.stats.reads for timed in runs]),
        "faults": lambda runs: _middle([timed.run.counters.major_faults for timed in runs]),
    }
    rows = [(_label(way.label, again), outcome.of(way, again=again)) for way, again in _turns(ways)]
    return _filled(table, columns, rows, whole)


def _decode_table(outcome: DecodeOutcome, whole: bool) -> Table:
    steps = f"{outcome.steps:,} steps after {outcome.context:,} tokens"
    table = _table(f"decode, {steps}, cold, no row cache: median [lowest, highest]", "mode")
    columns: Columns[Steps] = {
        "waited\np50, us": lambda runs: _spread([steps.waits_us[0] for steps in runs]),
        "waited\np99, us": lambda runs: _spread([steps.waits_us[1] for steps in runs]),
        "the least,\nus": lambda runs: _middle([outcome.least_us(steps) for steps in runs]),
        "to the table\np50, us": lambda runs: _middle([1e6 * statistics.median(s.run.to_table_s) for s in runs]),
        "step\np50, us": lambda runs: _middle([1e6 * statistics.median(steps.run.steps_s) for steps in runs]),
    }
    rows = [(_label(way.mode, again), outcome.of(way, again=again)) for way, again in _turns(outcome.ways)]
    return _filled(table, columns, rows, whole)


def _streams_table(outcome: StreamsOutcome, whole: bool) -> Table:
    steps = f"{outcome.steps:,} steps after {outcome.context:,} tokens"
    table = _table(f"decode of several streams, {steps}, cold, no row cache: median [lowest, highest]", "streams, mode")
    columns: Columns[StreamsRun] = {
        "tokens/s": lambda runs: _spread([run.tokens_per_s for run in runs]),
        "step\np50, us": lambda runs: _middle([run.step_us for run in runs]),
        "waited\np50, us": lambda runs: _middle([run.waits_us[0] for run in runs]),
        "waited\np99, us": lambda runs: _middle([run.waits_us[1] for run in runs]),
        "asking for\nrows, us": lambda runs: _middle([1e6 * run.rows_s / len(run.steps_s) for run in runs]),
        "scheduler,\n% of a step": lambda runs: _middle([100 * run.host_share for run in runs]),
        "peak\npages": lambda runs: _middle([n for run in runs if (n := run.peak_pages) is not None]),
    }
    rows = [(_label(arm.label, again), outcome.of(arm, again=again)) for arm, again in _turns(outcome.arms)]
    return _filled(table, columns, rows, whole)


def _queue_table(outcome: QueueOutcome, whole: bool) -> Table:
    each = f"prompts of {outcome.context:,} tokens, replies of {outcome.steps + 1:,}"
    table = _table(f"one lane, {each}, cold, no row cache: median [lowest, highest]", "queued, mode +lookahead")
    columns: Columns[QueueRun] = {
        "first in the\nqueue, s": lambda runs: _middle([run.queued_s[0] for run in runs]),
        "the queued waited\nfor rows, ms each": lambda runs: _middle([run.waited_ms for run in runs]),
        "at most,\nms": lambda runs: _middle([1e3 * max(run.waited_s) for run in runs]),
        "who had no queue\nwaited, ms": lambda runs: _middle([1e3 * run.first_waited_s for run in runs]),
    }
    rows = [
        (_label(f"{arm[0]}, {arm[1].label}", again), outcome.of(arm, again=again))
        for arm, again in _turns(outcome.arms)
    ]
    return _filled(table, columns, rows, whole)


def _turns(arms: Sequence[T]) -> list[tuple[T, bool]]:
    """All arms, and the first one's second run."""
    return [*((arm, False) for arm in arms), (arms[0], True)]


def _label(arm: str, again: bool) -> str:
    return f"{arm} (again)" if again else arm


def _filled(table: Table, columns: Columns[T], rows: Iterable[tuple[str, list[T]]], whole: bool) -> Table:
    """A row for each label that has runs, with a cell of them in each column; and how many, unless all are there."""
    if not whole:
        columns = {"rounds": lambda runs: str(len(runs)), **columns}
    for name in columns:
        table.add_column(name, justify="right")
    for label, runs in rows:
        if not runs:
            continue
        table.add_row(label, *(Text(cell(runs)) for cell in columns.values()))
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return _middle(values)
    return f"{_middle(values)} [{_figure(min(values))}, {_figure(max(values))}]"


def _middle(values: Sequence[float]) -> str:
    """The median; a dash where there is nothing of the kind."""
    return _figure(statistics.median(values)) if values else "-"


def _figure(value: float) -> str:
    return "0" if not value else ratio(value) if value < 10 else short(value)


def _method(outcome: EngineOutcome) -> list[str]:
    lines = [] if outcome.complete else [_STOPPED]
    lines.append("waited: what the device that computes stood still for rows, until they were there and expanded.")
    if outcome.prompts:
        lines.append(
            "T is the time from the first request for rows to the logits of the last token. T* is the least that reads "
            "at the device's limit, measured before and after each run, and computing, as long as it took with the "
            "table in memory in the same round, allow for these cuts."
        )
    for prompt in outcome.prompts:
        limits = [rate for timed in prompt.runs() for rate in timed.limits or ()]
        if limits:
            unsteady = sum(not timed.steady for timed in prompt.runs())
            beside = f"; runs beside an unsteady device: {unsteady}" if unsteady else ""
            again = f"; rounds that were run again: {prompt.repeats}" if prompt.repeats else ""
            lines.append(
                f"Prompt of {prompt.tokens:,}: {sum(prompt.reads):,} reads at least; the device's limit "
                f"{_spread(limits)} reads/s{beside}{again}."
            )
    if outcome.decode is not None:
        lines.append(
            f"Decode: the reads of a step alone, on a bare queue, take {outcome.decode.raw_p50_us:,.0f} us (p50). The "
            "least is that less the time to the table. Steps are given tokens of the text, each begun when the token "
            "before it was sampled."
        )
    if outcome.streams is not None:
        lines.append(
            "Streams: each follows a text of its own, one token a step, chosen and then replaced by the text's. asking "
            "for rows: until the reads of a step are under way. scheduler: the host's time in a step beside that, "
            f"launching the model and waiting for it. Before its steps a run took {_asides(outcome.streams)}."
        )
    by_sums = " Those of streams and queues were compared by a checksum a token."
    sums = by_sums if outcome.streams is not None or outcome.queue is not None else ""
    equal = f"Logits: equal, bit for bit, in all runs over the same tokens and cuts.{sums}"
    return [*lines, equal, *_fallbacks(outcome)]


def _asides(outcome: StreamsOutcome) -> str:
    """What a run takes that is not measured, by its parts."""
    asides = [run.aside_s for run in outcome.runs()]
    middles = {name: statistics.median(aside[name] for aside in asides) for name in asides[0]}
    return ", ".join(f"{seconds:.2f} s for {name}" for name, seconds in middles.items())


def _fallbacks(outcome: EngineOutcome) -> list[str]:
    backends = {(timed.way.mode, timed.run.backend) for prompt in outcome.prompts for timed in prompt.runs()}
    if outcome.queue is not None:
        backends |= {(run.way.mode, run.backend) for run in outcome.queue.runs()}
    if outcome.streams is not None:
        backends |= {(run.arm.way.mode, run.backend) for run in outcome.streams.runs()}
    if outcome.decode is not None:
        backends |= {(steps.way.mode, steps.run.backend) for steps in outcome.decode.runs()}
    return sorted(
        f"{mode} fell back: {backend.fallback_reason}." for mode, backend in backends if backend.fallback_reason
    )
