"""The headline: cold prompts through a whole model in every lazy mode, beside the least that disk and trunk allow.

    tools/headline.sh
    SIZE=tiny DEVICE=cpu tools/headline.sh
    LAYERS=24 IDS=ids.npy BUDGET_S=480 tools/headline.sh

Makes a table of 16 GiB or more, if it is not there, and measures with `lazyio bench-engine`, two rounds of one prompt
at a time, with as many layers of random weights as the device holds. What was measured is kept, and the same command
goes on from there. Ends with 0 if all is measured, with 1 if a step failed or outputs differ, with 2 for what can't be
done, with 3 if the budget ended first, with 130 if it was interrupted. docs/headline.md has the rest.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# In a checkout that is not installed, the package lies beside this folder; one that is installed comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from lazyio import settings
from lazyio.bench.headline.report import report
from lazyio.bench.headline.room import check_ids, fitting_layers, plan_of, table_bytes_of
from lazyio.bench.headline.steps import make, measure
from lazyio.bench.headline.work import ARCHITECTURE, BASELINE, STEP_ROUNDS, Subject, Work, check_unchanged, locked
from lazyio.bench.report import WIDTH
from lazyio.errors import LazyIOError, RunFailed, RunsDifferError, SettingError
from lazyio.ple.dtypes import TYPES

app = typer.Typer(add_completion=False)

_FAILED, _REFUSED, _BUDGET_ENDED, _INTERRUPTED = 1, 2, 3, 130
_MAKER = Path(__file__).with_name("make_model.py")
_PROMPTS = {"true": "8192,23664", "tiny": "300,700"}
_TINY_ROWS = 32_768
# A table of true size has at least so many bytes, and whole millions of rows of so many values.
_TABLE_BYTES, _MILLION, _ROW_VALUES = 16 << 30, 1_000_000, 160


class Size(StrEnum):
    true = "true"
    tiny = "tiny"


@app.command()
def headline(
    *,
    folder: Annotated[Path, typer.Option(envvar="FOLDER", help="Of the table, on the disk to measure.")] = Path(
        "headline"
    ),
    results: Annotated[
        Path | None, typer.Option(envvar="RESULTS", help="Of what was measured.", show_default="FOLDER/results")
    ] = None,
    size: Annotated[Size, typer.Option(envvar="SIZE", help="Of the model.")] = Size.true,
    stored: Annotated[str, typer.Option("--type", envvar="TYPE", help="Of the table's rows.")] = "F8_E4M3",
    trunk: Annotated[
        str | None, typer.Option(envvar="TRUNK", help="Of the weights.", show_default="values, as the model has them")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(envvar="ROWS", min=1, help="Of the table.", show_default="16 GiB of them, if true")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(envvar="LAYERS", min=1, help="Of the model.", show_default="what the device holds")
    ] = None,
    device: Annotated[
        str | None, typer.Option(envvar="DEVICE", help="cpu, cuda or cuda:N.", show_default="cuda if there")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(envvar="PROMPTS", help="Lengths in tokens.", show_default="8192,23664 if true")
    ] = None,
    modes: Annotated[str, typer.Option(envvar="MODES", help="Lazy modes.")] = "off,on-bare,on,on-direct,uring",
    lookahead: Annotated[str, typer.Option(envvar="LOOKAHEAD", help="Ubatches that are read ahead.")] = "0,2",
    ids: Annotated[
        Path | None, typer.Option(envvar="IDS", help="Token ids, a .npy file.", show_default="as bench-engine has it")
    ] = None,
    rounds: Annotated[int, typer.Option(envvar="ROUNDS", min=2, help="Of every prompt, an even number.")] = 6,
    step_s: Annotated[float, typer.Option(envvar="STEP_S", min=1, help="The most that a step may take.")] = 480,
    budget_s: Annotated[
        float | None, typer.Option(envvar="BUDGET_S", min=1, help="Stop before a step that would end later.")
    ] = None,
) -> None:
    """Measure cold prompts through a whole model in every lazy mode."""
    budget_s = math.inf if budget_s is None else budget_s
    ends = time.monotonic() + budget_s
    try:
        lengths, steps = _lengths(prompts or _PROMPTS[size]), _steps(rounds)
        _check_modes(modes, lookahead)
        rows = _rows(rows, size, stored)
        with locked(folder) as lock:
            model = folder.resolve() / f"{ARCHITECTURE}-{size}-{stored}-{rows}"
            work = Work(_MAKER, model, results or folder / "results", lengths, steps, step_s, budget_s, ends, lock)
            named = None if ids is None else str(ids.resolve())
            where = _device(device)
            subject = Subject(size.value, stored, rows, layers, where, modes, lookahead, named, _trunk(trunk))
            status = _go_on(work, subject)
    except (RunFailed, RunsDifferError) as error:
        _say(f"error: {error}")
        status = _FAILED
    except LazyIOError as error:
        _say(f"error: {error}")
        status = _REFUSED
    except OSError as error:
        _say(f"error: can't read or write {error.filename or folder}: {error.strerror}")
        status = _REFUSED
    except KeyboardInterrupt:
        _say("interrupted; what was measured is kept, and the same command goes on")
        status = _INTERRUPTED
    raise typer.Exit(status)


def _go_on(work: Work, subject: Subject) -> int:
    """Measure what is missing, and print; the exit status."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    before = work.before()
    subject = replace(subject, layers=subject.layers or before.get("layers"))
    check_unchanged(work.results, before, subject)
    complete = not work.missing()
    if not complete:
        plan = plan_of(subject)
        check_ids(plan, subject, max(work.lengths))
        subject = replace(subject, layers=fitting_layers(plan, subject, max(work.lengths), work.lock))
        made = make(work, subject, table_bytes_of(plan, subject.stored), _say)
        try:
            complete = measure(work, subject, made, _say)
        except BaseException:  # what was measured before an interrupt or an error stands
            report(work, subject, console)
            raise
    report(work, subject, console)
    return 0 if complete else _BUDGET_ENDED


def _say(line: str) -> None:
    typer.echo(f"headline: {line}", err=True)


def _lengths(prompts: str) -> list[int]:
    words = [word.strip() for word in prompts.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) for word in words) or len({*words}) < len(words):
        raise SettingError(f"PROMPTS is {prompts!r}; it can be numbers of tokens separated by commas, each once")
    return [int(word) for word in words]


def _steps(rounds: int) -> int:
    if rounds % STEP_ROUNDS:
        raise SettingError(f"ROUNDS is {rounds}; it must be even, for every other round goes backwards")
    return rounds // STEP_ROUNDS


def _check_modes(modes: str, lookahead: str) -> None:
    from lazyio.engine.bench.ways import ways_of  # without torch this raises, and says how to install it

    if all(way.mode != BASELINE for way in ways_of(modes, lookahead)):
        raise SettingError(f"MODES is {modes!r}, and must have {BASELINE}, which the others are compared with")


def _rows(asked: int | None, size: str, stored: str) -> int:
    """Rows asked for, else those of the size."""
    from lazyio.engine.synthetic.folder import TABLE_TYPES

    if stored not in TABLE_TYPES:
        raise SettingError(f"TYPE is {stored!r}; it can be {', '.join(TABLE_TYPES)}")
    if asked is not None or size == Size.tiny:
        return asked or _TINY_ROWS
    return math.ceil(_TABLE_BYTES / TYPES[stored].row_bytes(_ROW_VALUES) / _MILLION) * _MILLION


def _trunk(asked: str | None) -> str | None:
    """A type of weights. Raises SettingError for one that they can't have."""
    trunk: str | None = settings.resolve("trunk", asked)
    return trunk


def _device(asked: str | None) -> str:
    """cpu or cuda:N, which is there. Raises SettingError or Unsupported."""
    import torch

    from lazyio.engine.place import device_of

    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    # Without a number, torch would begin to use the device to tell which one it is.
    return str(device_of(asked if asked == "cpu" or ":" in asked else f"{asked}:0"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
