"""The pipeline's figures as a table, and as a picture of who waited for what."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyio.bench.figures import ratio, short
from lazyio.bench.pipeline import GATHER, PLANNED, WAYS, PipelineOutcome, PipelineRun

_COLOURS = ("#1f3b57", "#7da7d9")
_WAITING, _FLOOR = "#e8c9c4", "#b03a2e"


def show_pipeline(outcome: PipelineOutcome, console: Console) -> None:
    """Print everything."""
    title = Text(_title(outcome))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    for name in ("ubatches", "T, ms", "T / T*", "T / max(reads,\ncomputes)", "times the\nfirst"):
        table.add_column(name, justify="right")
    for way in outcome.ways:
        walls = [1e3 * run.wall_s for run in outcome.counted(way)]
        spread = f"{short(1e3 * outcome.median(way, 'wall_s'))} [{short(min(walls))}, {short(max(walls))}]"
        times = outcome.median(GATHER, "wall_s") / outcome.median(way, "wall_s")
        floor, greater = outcome.median(way, "over_floor"), outcome.median(way, "over_greater_sum")
        cells = (str(len(outcome.cuts[way])), spread, ratio(floor), ratio(greater), ratio(times))
        table.add_row(way, *map(Text, cells))
    console.print(table)
    for line in _method(outcome):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _title(outcome: PipelineOutcome) -> str:
    counted = sum(run.steady for run in outcome.runs)
    stopped = "" if outcome.complete else ", stopped before the end"
    return f"cold: median [lowest, highest], {counted} of {len(outcome.runs)} runs beside a steady device{stopped}"


def _method(outcome: PipelineOutcome) -> list[str]:
    how = "a busy loop" if outcome.spin else "sleeping"
    return [
        f"Table: {outcome.spec.path}, {outcome.spec.rows:,} rows of {outcome.spec.row_bytes} bytes, read by "
        f"{outcome.backend}",
        f"Prompt: {len(outcome.prompt.rows):,} tokens, {outcome.workload.source}",
        f"Reads: {outcome.prompt.reads_per_token:.1f} a token; the device gives {short(outcome.limit.iops)} reads/s",
        f"Computing: {1e6 * outcome.prompt.compute_token_s:,.0f} us a token, simulated by {how}",
        f"Planned cuts: {', '.join(map(str, outcome.cuts[PLANNED]))}",
        *(f"{way}: bound by {run.bound_by}; {run.bound_reason}" for way, run in _middles(outcome).items()),
        *(
            [f"Verified: {outcome.verify} rows of every gather or ticket, while the clock ran"]
            if outcome.verify
            else []
        ),
        "T is the time from the first request to the end of the last ubatch. T* is what planned cuts could reach, were "
        "every read as fast as the device's limit beside that run.",
    ]


def _middles(outcome: PipelineOutcome) -> dict[str, PipelineRun]:
    """Of each way the run that took the middle time."""
    ordered = {way: sorted(outcome.counted(way), key=lambda run: run.wall_s) for way in outcome.ways}
    return {way: runs[len(runs) // 2] for way, runs in ordered.items()}


def draw_pipeline(outcome: PipelineOutcome, path: Path) -> None:
    """Write a picture of one run of each way: computing in blue, a block a ubatch, and waiting for rows between.

    Raises OSError where the file can't be written.
    """
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(8.5, 2.9), layout="constrained")
    axes = figure.subplots()
    for place, way in enumerate(WAYS):
        run = _middles(outcome)[way]
        spans = [(1e3 * start, 1e3 * (end - start)) for start, end in zip(run.ready_s, run.computed_s, strict=True)]
        axes.broken_barh([(0, 1e3 * run.wall_s)], (place - 0.3, 0.6), facecolors=_WAITING)
        axes.broken_barh(spans, (place - 0.3, 0.6), facecolors=[_COLOURS[turn % 2] for turn in range(len(spans))])
        axes.annotate(f" {1e3 * run.wall_s:,.0f} ms", (1e3 * run.wall_s, place), va="center", fontsize=9)
    floor_ms = 1e3 * outcome.median(PLANNED, "wall_s") / outcome.median(PLANNED, "over_floor")
    axes.axvline(floor_ms, color=_FLOOR, linestyle="--", linewidth=1.2, label=f"T* {floor_ms:,.0f} ms")
    axes.set_yticks(range(len(WAYS)), list(WAYS))
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms; blue: computing a ubatch, red: waiting for its rows")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.suptitle(f"A prompt of {len(outcome.prompt.rows):,} tokens, cold", fontsize=11)
    figure.savefig(path, dpi=100, format="png")
