"""The command `lazyio bench`: its options, and what is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lazyio.bench.kept import KeptJson
from lazyio.bench.options import (
    DEFAULT_LIMIT_READS,
    DEFAULT_MODES,
    DEFAULT_STEPS,
    DEFAULT_UBATCH,
    Request,
)
from lazyio.bench.outcome import Outcome
from lazyio.bench.pipeline import PipelineOutcome, execute_pipeline
from lazyio.bench.pipeline_view import draw_pipeline, show_pipeline
from lazyio.bench.plot import draw, require_matplotlib
from lazyio.bench.report import WIDTH, show
from lazyio.bench.rounds import Rules
from lazyio.bench.session import execute
from lazyio.bench.workload import DEFAULT_TOKENS

_TEMPERATURE, _ROWS, _READING, _ROUNDS = "Temperature", "Rows asked for", "Reading", "Rounds"
_PIPELINE = "Reading ahead"


def bench(
    path: Annotated[
        Path | None,
        typer.Argument(help="A model file or folder. Without it, a demo table is made and used.", show_default=False),
    ] = None,
    *,
    tensor: Annotated[str | None, typer.Option(help="Name of the table, where it is not found by itself.")] = None,
    demo_dir: Annotated[
        Path | None, typer.Option(help="Folder of the demo table.", show_default="./lazyio-demo")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results to this .png file.")] = None,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Nothing of it in memory, proved. The default.", rich_help_panel=_TEMPERATURE),
    ] = False,
    warm: Annotated[
        bool, typer.Option("--warm", help="After an untimed pass over the same rows.", rich_help_panel=_TEMPERATURE)
    ] = False,
    preload: Annotated[
        str | None,
        typer.Option(
            help="hot-set: the rows asked for are brought into the page cache first, and all modes read buffered.",
            rich_help_panel=_TEMPERATURE,
        ),
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="Token ids, a .npy file of integers.", rich_help_panel=_ROWS)] = None,
    uniform: Annotated[bool, typer.Option("--uniform", help="Random tokens.", rich_help_panel=_ROWS)] = False,
    trace: Annotated[Path | None, typer.Option(help="Recorded gathers, a .npz file.", rich_help_panel=_ROWS)] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="How many tokens.", show_default=str(DEFAULT_TOKENS), rich_help_panel=_ROWS),
    ] = None,
    ubatch: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a gather.", show_default=str(DEFAULT_UBATCH), rich_help_panel=_ROWS),
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Gathers of one token, each timed by itself.", rich_help_panel=_ROWS)
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="How many steps to decode.", show_default=str(DEFAULT_STEPS), rich_help_panel=_ROWS),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of random tokens and orders.", rich_help_panel=_ROWS)] = 0,
    modes: Annotated[
        str, typer.Option(help="Lazy modes or names of fetchers, separated by commas.", rich_help_panel=_READING)
    ] = DEFAULT_MODES,
    workers: Annotated[
        str | None,
        typer.Option(help="Reads at once, of modes with a pool; 1,8,32 compares three.", rich_help_panel=_READING),
    ] = None,
    direct_io: Annotated[str | None, typer.Option(help="auto, on or off.", rich_help_panel=_READING)] = None,
    queue_depth: Annotated[
        int | None, typer.Option(help="Reads in flight, of modes with a queue.", rich_help_panel=_READING)
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(help="Least length of a direct read.", rich_help_panel=_READING)
    ] = None,
    verify: Annotated[
        int | None,
        typer.Option(min=1, help="Read so many rows of every gather once more, and compare.", rich_help_panel=_READING),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail instead of falling back.", rich_help_panel=_READING)
    ] = False,
    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline",
            help="Compare orders of reading and computing a prompt, instead of modes.",
            rich_help_panel=_PIPELINE,
        ),
    ] = False,
    compute_us_per_token: Annotated[
        float | None,
        typer.Option(min=1, help="What a token takes to compute, simulated by sleeping.", rich_help_panel=_PIPELINE),
    ] = None,
    spin: Annotated[
        bool,
        typer.Option("--spin", help="Simulate it by a busy loop that keeps the GIL.", rich_help_panel=_PIPELINE),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often each mode runs.", rich_help_panel=_ROUNDS)] = 5,
    aa: Annotated[
        str | None,
        typer.Option(help="The mode that runs twice a round.", show_default="the last one", rich_help_panel=_ROUNDS),
    ] = None,
    limit_reads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Reads of a limit arm.", show_default=str(DEFAULT_LIMIT_READS), rich_help_panel=_ROUNDS
        ),
    ] = None,
    min_iops: Annotated[
        float | None,
        typer.Option(min=1, help="Repeat rounds in which the device gives fewer reads/s.", rich_help_panel=_ROUNDS),
    ] = None,
    max_repeats: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Repeats of all rounds together.",
            show_default=str(Rules(1).max_repeats),
            rich_help_panel=_ROUNDS,
        ),
    ] = None,
    pause: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds before a round below --min-iops is repeated.",
            show_default=f"{Rules(1).pause_s:.0f}",
            rich_help_panel=_ROUNDS,
        ),
    ] = None,
) -> None:
    """Compare lazy modes on one table, in turns, beside the device's own limit."""
    request = Request(**locals())
    request.check()
    if plot is not None:
        require_matplotlib()
    console = Console()
    if not console.is_terminal:
        console.width = max(WIDTH, console.width)
    outcome = _measure(request, pipeline, json, console)
    if plot is not None:
        if isinstance(outcome, PipelineOutcome):
            draw_pipeline(outcome, plot)
        else:
            draw(outcome, plot)
        console.print(f"Picture: {plot}", highlight=False, markup=False, soft_wrap=True)


def _measure(request: Request, pipeline: bool, json: Path | None, console: Console) -> Outcome | PipelineOutcome:
    """Measure, print and keep. What was measured before an interrupt stands; what goes wrong leaves no figure."""
    kept = KeptJson(json)
    latest: Outcome | PipelineOutcome | None = None

    def keep(outcome: Outcome | PipelineOutcome) -> None:
        nonlocal latest
        latest = outcome
        kept.write(outcome.as_json())

    try:
        latest = execute_pipeline(request, console, keep) if pipeline else execute(request, console, keep)
    except KeyboardInterrupt:
        _show(latest, kept, json, console)
        raise
    except BaseException:
        kept.void()
        raise
    _show(latest, kept, json, console)
    return latest


def _show(outcome: Outcome | PipelineOutcome | None, kept: KeptJson, json: Path | None, console: Console) -> None:
    if isinstance(outcome, PipelineOutcome):
        show_pipeline(outcome, console)
    elif outcome is not None:
        show(outcome, console)
    if outcome is None:
        return
    kept.write(outcome.as_json(), last=True)
    if json is not None:
        console.print(f"Results: {json}", highlight=False, markup=False, soft_wrap=True)
