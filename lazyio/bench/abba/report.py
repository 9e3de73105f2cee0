"""The comparison as tables for people, and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyio.bench.abba.journal import CellRecord, Journal, Run
from lazyio.bench.abba.judge import ArmResult, CellResult, MetricResult, judged
from lazyio.bench.abba.plan import Plan
from lazyio.bench.figures import ratio, short
from lazyio.bench.summary import Paired


def results(plan: Plan, journal: Journal) -> list[CellResult]:
    """What is said of each cell."""
    return [judged(plan, cell, journal.cells[cell]) for cell in plan.cells]


def accepted(found: Sequence[CellResult]) -> bool:
    """Whether every cell is complete, none is void, and no arm is slower beyond the noise."""
    return all(cell.complete and not cell.slower for cell in found)


def show(plan: Plan, journal: Journal, console: Console) -> None:
    """Print everything."""
    found = results(plan, journal)
    for result in found:
        if result.metrics:
            console.print(_table(plan, result))
    lines = [
        *_method(plan),
        *(line for result in found for line in _of_cell(result, journal.cells[result.cell], journal.sittings)),
        *_machine([run for record in journal.cells.values() for run in record.runs]),
        *_judgement(found),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_json(plan: Plan, journal: Journal) -> dict[str, Any]:
    """The plan, the results, and every run."""
    found = results(plan, journal)
    return {
        "accepted": accepted(found),
        "plan": plan.as_json(),
        "sittings": journal.sittings,
        "cells": [asdict(result) | {"metrics": _named(result)} for result in found],
        "runs": [
            {"cell": cell, "round": number, "sitting": record.sittings[number], **asdict(run)}
            for cell, record in journal.cells.items()
            for number, turns in enumerate(record.rounds)
            for run in turns
        ],
    }


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write a document whole, in the place of what is there, or not at all. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(document, indent=2) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _named(result: CellResult) -> dict[str, Any]:
    return {
        each.metric.name: {
            "better": each.metric.better,
            "noise": each.noise,
            "arms": [asdict(arm) for arm in each.arms],
        }
        for each in result.metrics
    }


def _table(plan: Plan, result: CellResult) -> Table:
    so_far = f"{result.rounds} rounds" if result.complete else f"{result.rounds} of {plan.rounds} rounds, NOT COMPLETE"
    title = Text(f"{result.cell}: {so_far}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    table.add_column(Text("mean [min, max] ±2 SE"), justify="right")
    table.add_column(Text(f"times as fast as {plan.reference},\nmedian [min, max]"), justify="right")
    table.add_column("mean ±2 SE", justify="right")
    table.add_column("rounds\nslower", justify="right")
    table.add_column("verdict", no_wrap=True)
    for metric in result.metrics:
        for arm in metric.arms:
            name = metric.metric.name if arm is metric.arms[0] else ""
            table.add_row(*(Text(cell) for cell in (name, *_cells(metric, arm))))
    return table


def _cells(metric: MetricResult, arm: ArmResult) -> Iterator[str]:
    level, paired = arm.level, arm.times_as_fast
    yield f"{arm.arm}{' (again)' if arm.again else ''}"
    spread = "" if level.two_se is None else f" ±{_figure(level.two_se)}"
    yield f"{_figure(level.mean)} [{_figure(level.low)}, {_figure(level.high)}]{spread}"
    yield "" if paired is None else f"{_close(paired.median)} [{_close(paired.low)}, {_close(paired.high)}]"
    yield "" if paired is None else _mean(paired)
    yield "" if paired is None else f"{paired.slower} of {paired.rounds}"
    if arm.again:
        yield "" if metric.noise is None else f"noise ±{_close(metric.noise)}"
    else:
        yield "" if arm.verdict is None else arm.verdict.upper() if arm.verdict == "slower" else arm.verdict


def _mean(paired: Paired) -> str:
    return _close(paired.mean) + ("" if paired.two_se is None else f" ±{_close(paired.two_se)}")


def _figure(value: float) -> str:
    size = abs(value)
    if size >= 10:
        return short(value) if value > 0 else f"-{short(size)}"
    return "0" if not value else f"{value:.3g}"


def _close(value: float) -> str:
    """A ratio near 1 with the digits that tell it from 1."""
    return f"{value:.3f}" if value < 9.9995 else ratio(value)


def _method(plan: Plan) -> Iterator[str]:
    jobs = [job for arms in plan.jobs.values() for job in arms.values()]
    heat = " Cold: before each run no OS page of the table was in memory, as mincore tells." if jobs[0].cold else ""
    prepared = " A command prepares each run." if jobs[0].before_each else ""
    yield (
        f"Arms take turns, every other round backwards, each run in a process of its own.{heat}{prepared} Ratios are "
        f"of runs of the same round; the second run of {plan.reference} in each shows the noise."
    )
    yield (
        f"Outputs: {', '.join(map(str, plan.equal))} must be equal in all runs of a cell."
        if plan.equal
        else "Outputs: NOT COMPARED, as the definition has it."
    )


def _of_cell(result: CellResult, record: CellRecord, machines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if result.void is not None:
        yield f"{result.cell}: VOID, its outputs differ: {result.void}."
    if result.failed is not None:
        yield f"{result.cell}: FAILED after {result.rounds} rounds: {result.failed}"
    sittings = sorted(set(record.sittings))
    if len(sittings) > 1:
        first, *others = (machines[number] for number in sittings)
        changed = [name for name in first if any(machine[name] != first[name] for machine in others)]
        where = f", between which the machine's {', '.join(changed)} changed" if changed else ""
        yield f"{result.cell}: measured in {len(sittings)} sittings{where}; each round is of one of them."


def _machine(runs: Sequence[Run]) -> Iterator[str]:
    if not runs:
        return
    loads = _range((run.before["load"] for run in runs), "")
    clocks = _range((state["cpu_mhz"] for run in runs for state in (run.before, run.after)), " MHz")
    yield f"Before runs: load {loads}. Processors: {clocks}."
    states = [(when, gpu) for run in runs for when in ("before", "after") for gpu in getattr(run, when)["gpus"]]
    for index, name in sorted({(gpu["index"], gpu["name"]) for _, gpu in states}):
        mine = [(when, gpu) for when, gpu in states if gpu["index"] == index and gpu["name"] == name]
        told = (
            f"{word} {_range((gpu[key] for when, gpu in mine if when in at), unit)}"
            for word, key, unit, at in (
                ("temperature", "temperature_c", " C", ("before", "after")),
                ("SM clock after runs", "sm_mhz", " MHz", ("after",)),
                ("memory clock after runs", "memory_mhz", " MHz", ("after",)),
                ("power after runs", "power_w", " W", ("after",)),
                ("busy before runs", "busy_percent", " %", ("before",)),
            )
        )
        yield f"GPU {index:.0f}, {name}: {', '.join(told)}."


def _range(values: Iterable[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not known"
    low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (min(known), max(known)))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _judgement(found: Sequence[CellResult]) -> Iterator[str]:
    for result in found:
        for metric, arm in result.slower:
            assert arm.times_as_fast is not None
            yield f"SLOWER beyond the noise: {arm.arm} in {result.cell}, {metric.name}: {_mean(arm.times_as_fast)}."
    seen = [arm.seen_from for cell in found for each in cell.metrics for arm in each.arms if arm.seen_from is not None]
    complete = sum(result.complete for result in found)
    if complete and not any(result.slower for result in found):
        yield (
            f"No arm is slower beyond its noise in {complete} of {len(found)} cells; a slow-down of more than "
            f"{100 * max(seen):.1f} % would have shown in all of them, of {100 * min(seen):.1f} % in the quietest."
        )
    if complete < len(found):
        yield f"{len(found) - complete} of {len(found)} cells are not complete, and not judged."
