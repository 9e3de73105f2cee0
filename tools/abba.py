"""Compare commands, in turns, and judge whether any is slower than another beyond the noise.

    python tools/abba.py runs.toml --json runs.json --budget-s 480
    python tools/abba.py --state s.jsonl --command 'lazyio bench-engine M --prompts {n} --modes {mode} --json {out}' \\
        --arm 'on: mode=on' --arm 'uring: mode=uring' --cell '2k: n=2048' --cell '8k: n=8192' --equal '' \\
        --metric 'prompt_s: lower prompts.0.rounds.*.[way.mode=uring].run.wall_s'

Cells are settings of the workload, arms are what is compared in each. A round runs every arm once, each in a process of
its own, and the first arm twice; every other round goes backwards. What is measured is kept in the state file, and the
same command goes on from there. Ends with 0 if all cells are measured, outputs agree and no arm is slower beyond the
noise, with 1 if not, with 3 if the budget ended first, with 2 for what can't be done, with 130 if it was interrupted.
docs/abba.md describes definitions and the documents that commands give.
"""

from __future__ import annotations

import shlex
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

# In a checkout that is not installed, the package lies beside this folder; one that is installed comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from lazyio.bench.abba.definition import plan_of
from lazyio.bench.abba.journal import Journal
from lazyio.bench.abba.plan import Plan
from lazyio.bench.abba.report import accepted, as_json, results, show, write_json
from lazyio.bench.abba.session import Session, runs_left
from lazyio.bench.report import WIDTH
from lazyio.bench.watch import Watch
from lazyio.errors import LazyIOError, SettingError

app = typer.Typer(add_completion=False)

_REFUSED, _NOT_ACCEPTED, _BUDGET_ENDED, _INTERRUPTED = 2, 1, 3, 130
_INLINE = "Without a file"


@app.command()
def abba(
    definition: Annotated[
        Path | None, typer.Argument(metavar="RUNS.toml", help="What to compare.", show_default=False)
    ] = None,
    *,
    state: Annotated[
        Path | None, typer.Option(help="What was measured so far; made if need be.", show_default="RUNS.state.jsonl")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results and every run to this file.")] = None,
    budget_s: Annotated[float | None, typer.Option(min=0, help="Stop before a step that would end later.")] = None,
    again: Annotated[list[str] | None, typer.Option(help="A cell to measure from its start once more.")] = None,
    command: Annotated[str | None, typer.Option(help="Of all arms.", rich_help_panel=_INLINE)] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="'NAME: KEY=VALUE ...', the first is the reference.", rich_help_panel=_INLINE),
    ] = None,
    cell: Annotated[list[str] | None, typer.Option(help="'NAME: KEY=VALUE ...'", rich_help_panel=_INLINE)] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="'NAME: lower|higher [PATH]'", rich_help_panel=_INLINE)
    ] = None,
    equal: Annotated[
        str | None, typer.Option(help="Paths with commas between; '' for none.", rich_help_panel=_INLINE)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="An even number.", rich_help_panel=_INLINE)] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Of one command.", rich_help_panel=_INLINE)] = None,
    before_each: Annotated[str | None, typer.Option(help="A command before each run.", rich_help_panel=_INLINE)] = None,
    cold: Annotated[
        str | None, typer.Option(help="A model whose table is made cold before each run.", rich_help_panel=_INLINE)
    ] = None,
) -> None:
    """Compare commands in turns, each run in a process of its own."""
    inline = {
        "command": command,
        "arms": arm and {"--arm": arm},
        "cells": cell and {"--cell": cell},
        "metrics": metric and {"--metric": metric},
        "equal": None if equal is None else [path.strip() for path in equal.split(",") if path.strip()],
        "rounds": rounds,
        "timeout_s": timeout_s,
        "before_each": before_each,
        "cold": cold and {"model": cold},
    }
    try:
        plan = plan_of(_given(definition, {key: value for key, value in inline.items() if value is not None}))
        status = _compare(plan, _state(definition, state), json, budget_s, again or [])
    except LazyIOError as error:
        typer.echo(f"abba: error: {error}", err=True)
        status = _REFUSED
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        typer.echo(f"abba: error: can't read or write{where}: {error.strerror}", err=True)
        status = _REFUSED
    except KeyboardInterrupt:
        typer.echo("abba: interrupted; what was measured is kept, and the same command goes on from there", err=True)
        status = _INTERRUPTED
    raise typer.Exit(status)


def _compare(plan: Plan, state: Path, json: Path | None, budget_s: float | None, again: Sequence[str]) -> int:
    """Measure, print and write; the exit status."""
    with Journal(state, plan.as_json()) as journal:
        for cell in again:
            journal.again(cell)
        with Watch(Console(stderr=True), runs_left(plan, journal)) as watch:
            tried = Session(plan, journal, watch, budget_s).execute()
        show(plan, journal, Console(width=None if Console().is_terminal else WIDTH, highlight=False))
        if json is not None:
            write_json(as_json(plan, journal), json)
        if not tried:
            return _BUDGET_ENDED
        return 0 if accepted(results(plan, journal)) else _NOT_ACCEPTED


def _given(definition: Path | None, inline: dict[str, Any]) -> dict[str, Any]:
    """What is to be compared, from a file or from options."""
    if definition is None:
        readers = {"arms": _settings, "cells": _settings, "metrics": _metric}
        return {key: _named(value, readers[key]) if key in readers else value for key, value in inline.items()}
    if inline:
        raise SettingError(f"{definition} has the definition, so that there can't be another {', '.join(inline)}")
    try:
        return tomllib.loads(definition.read_text())
    except ValueError as error:  # of TOML, or of its encoding
        raise SettingError(f"{definition} is not TOML: {error}") from None


def _state(definition: Path | None, state: Path | None) -> Path:
    if state is None and definition is None:
        raise SettingError("there is no definition file beside which the state could be kept; give --state FILE")
    return state or Path(f"{str(definition).removesuffix('.toml')}.state.jsonl")


def _named(given: dict[str, list[str]], read: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Tables by name from options like 'NAME: ...'."""
    ((option, texts),) = given.items()
    tables: dict[str, Any] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        if not colon or name.strip() in tables:
            raise SettingError(f"{option} is {text!r}; it should be a name, other than those before, a colon and more")
        tables[name.strip()] = read(f"{option} {text!r}", rest)
    return tables


def _settings(where: str, text: str) -> dict[str, Any]:
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:  # a quotation that is not closed
        raise SettingError(f"{where}: {error}") from None
    if not all(equals for _, equals, _ in pairs):
        raise SettingError(f"{where} should have KEY=VALUE after the colon, with blanks between")
    return {"set": {key: value for key, _, value in pairs}}


def _metric(where: str, text: str) -> dict[str, Any]:
    words = text.split(maxsplit=1)
    if not words:
        raise SettingError(f"{where} should have lower or higher after the colon")
    return {"better": words[0]} | ({"path": words[1]} if len(words) > 1 else {})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
