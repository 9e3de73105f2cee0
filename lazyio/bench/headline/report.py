"""All steps together, as one table for people and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyio.bench.figures import ratio, short
from lazyio.bench.headline.work import BASELINE, Subject, Work
from lazyio.bench.kept import write_whole
from lazyio.bench.rounds import STEADY_WITHIN
from lazyio.errors import RunsDifferError

_FIGURES = ("tokens/s", "T, ms", "T*, ms", "T / T*", "waited, ms", "reads", "faults", "times on-bare")
_SPREAD = ("T / T*", "times on-bare")
_COUNTS = ("reads", "faults")

# What bench-engine writes, read back.
_Step = Mapping[str, Any]


def report(work: Work, subject: Subject, console: Console) -> None:
    """Print what is measured, and write it beside the steps.

    Raises RunsDifferError where steps of a prompt do not belong together.
    """
    measured = {tokens: steps for tokens in work.lengths if (steps := work.measured(tokens))}
    for tokens, steps in measured.items():
        _check_same(work.results, tokens, steps)
    figures = {tokens: _figures_of(tokens, steps) for tokens, steps in measured.items()}
    if not figures:
        return
    write_whole(work.results / "headline.json", {"subject": subject.as_json(), "figures": figures})
    console.print(_table(figures))
    subjects = dict.fromkeys(steps[0]["subject"] for steps in measured.values())
    for line in (*subjects, *map(_note, measured, measured.values()), f"Every run: {work.results}"):
        console.print(line, markup=False, soft_wrap=True)


def _check_same(results: Path, tokens: int, steps: Sequence[_Step]) -> None:
    """Raise RunsDifferError where the steps of a prompt are not of one model, table, device and result."""
    logits = {timed["run"]["logits"] for timed in _runs(steps)}
    if len(logits) > 1 or len({step["subject"] for step in steps}) > 1:
        what = "logits" if len(logits) > 1 else "a model, a table, a device or tokens"
        raise RunsDifferError(
            f"steps of {tokens:,} tokens had {what} that differ from one to another, so there are no figures; remove "
            f"{results}/{tokens}-*.json"
        )


def _rounds(steps: Sequence[_Step]) -> list[list[dict[str, Any]]]:
    return [turns for step in steps for turns in step["prompts"][0]["rounds"]]


def _runs(steps: Sequence[_Step]) -> list[dict[str, Any]]:
    return [timed for turns in _rounds(steps) for timed in turns]


def _figures_of(tokens: int, steps: Sequence[_Step]) -> dict[str, dict[str, list[float]]]:
    """By way and name, a figure a round. The baseline is on-bare with the least lookahead in the same round."""
    found = dict[str, dict[str, list[float]]]()
    for turns in _rounds(steps):
        bare = [timed for timed in turns if timed["way"]["mode"] == BASELINE]
        bare_s = min(bare, key=lambda timed: timed["way"]["lookahead"])["run"]["wall_s"]
        for timed in sorted(turns, key=lambda timed: timed["again"]):
            way, run = timed["way"], timed["run"]
            label = f"{way['mode']} +{way['lookahead']}{' (again)' if timed['again'] else ''}"
            own = found.setdefault(label, {name: [] for name in _FIGURES})
            for name, value in zip(_FIGURES, _values(tokens, timed["floor_s"], run, bare_s), strict=True):
                own[name].append(value)
    return found


def _values(tokens: int, floor_s: float, run: Mapping[str, Any], bare_s: float) -> tuple[float, ...]:
    """In the order of _FIGURES."""
    wall_s, waited_s = run["wall_s"], sum(run["waits_s"])
    counts = run["stats"]["reads"], run["counters"]["major_faults"]
    return tokens / wall_s, 1e3 * wall_s, 1e3 * floor_s, wall_s / floor_s, 1e3 * waited_s, *counts, bare_s / wall_s


def _table(figures: Mapping[int, Mapping[str, Mapping[str, Sequence[float]]]]) -> Table:
    title = Text("cold prompts: median [lowest, highest]")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tokens", justify="right")
    table.add_column("mode +lookahead", no_wrap=True)
    for name in _FIGURES:
        table.add_column(name, justify="right")
    for tokens, ways in figures.items():
        for label, own in ways.items():
            cells = (Text(_cell(name, own[name])) for name in _FIGURES)
            table.add_row(f"{tokens:,}", label, *cells)
        table.add_section()
    return table


def _cell(name: str, values: Sequence[float]) -> str:
    if name in _COUNTS:
        return f"{statistics.median(values):,.0f}"
    return _spread(values) if name in _SPREAD else _figure(statistics.median(values))


def _spread(values: Sequence[float]) -> str:
    return f"{_figure(statistics.median(values))} [{_figure(min(values))}, {_figure(max(values))}]"


def _figure(value: float) -> str:
    return "0" if not value else ratio(value) if value < 10 else short(value)


def _note(tokens: int, steps: Sequence[_Step]) -> str:
    """What a prompt was measured with, and beside."""
    prompt, runs = steps[0]["prompts"][0], _runs(steps)
    limits = [rate for timed in runs for rate in timed["limits"] or ()]
    unsteady = sum(max(timed["limits"]) > STEADY_WITHIN * min(timed["limits"]) for timed in runs if timed["limits"])
    ubatches = len(prompt["cuts"])
    cuts = f"{ubatches} ubatches of at most {max(prompt['cuts']):,}" if ubatches > 1 else "one ubatch"
    repeats = sum(step["prompts"][0]["repeats"] for step in steps)
    rounds = len(_rounds(steps))
    counted = f"{rounds} round{'' if rounds == 1 else 's'}"
    return (
        f"Prompt of {tokens:,}: {counted}; {cuts}; {sum(prompt['reads']):,} reads at least; the "
        f"device's limit {_spread(limits)} reads/s; runs beside an unsteady device: {unsteady}; rounds that were run "
        f"again: {repeats}."
    )
