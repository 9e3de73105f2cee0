"""Make a model of random weights: a folder or a GGUF file, with its table and a small real tokenizer.

    python tools/make_model.py FOLDER --arch qwen4_exp
    python tools/make_model.py OUT.gguf --arch gemma4 --type Q5_K --parts 3
    python tools/make_model.py FOLDER --arch qwen4_exp --size true --rows 50000000 --no-trunk

Without its trunk a model has its configuration, its tokenizer and its table, which is all that is read of one whose
weights are to be random anyway (load_format "dummy").
"""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

# In a checkout that is not installed, the package lies beside this folder; one that is installed comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from lazyio.errors import LazyIOError, SettingError
from lazyio.units import format_bytes

if TYPE_CHECKING:
    from lazyio.engine.synthetic import Plan

app = typer.Typer(add_completion=False)

# Of parameters, where nothing else is asked for.
_TRUNKS = {"tiny": "F32", "true": "BF16"}


class Format(StrEnum):
    folder = "folder"
    gguf = "gguf"


class Architecture(StrEnum):
    gemma3n = "gemma3n"
    gemma4 = "gemma4"
    qwen3_5 = "qwen3_5"
    qwen3_5_moe = "qwen3_5_moe"
    qwen4_exp = "qwen4_exp"


class Size(StrEnum):
    tiny = "tiny"
    true = "true"


@app.command()
def make_model(
    out: Annotated[Path, typer.Argument(help="A folder, or a .gguf file.")],
    arch: Annotated[Architecture, typer.Option(help="The architecture, as config.json calls it.")],
    size: Annotated[Size, typer.Option(help="Some megabytes, or as released.")] = Size.tiny,
    layers: Annotated[int | None, typer.Option(help="Decoder layers (unset: what the size has).")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the table, about (unset: what the size has).")] = None,
    stored: Annotated[
        str | None, typer.Option("--type", help="Type of the table's rows (unset: BF16, in GGUF Q8_0).")
    ] = None,
    trunk: Annotated[str | None, typer.Option(help="Type of the parameters (unset: tiny F32, true BF16).")] = None,
    file_format: Annotated[Format | None, typer.Option("--format", help="Unset: as the name of OUT says.")] = None,
    shards: Annotated[
        int | None, typer.Option(help="folder: tensors of a table of n-grams (unset: tiny 4, true 128).")
    ] = None,
    parts: Annotated[int | None, typer.Option(help="gguf: parts of a split file (unset: 1).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of all random values.")] = 0,
    no_trunk: Annotated[bool, typer.Option("--no-trunk", help="folder: leave the parameters out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Make a model of random weights."""
    started = time.monotonic()
    try:
        # Without torch this raises, and says how to install it.
        from lazyio.engine.synthetic import plan_model, write_folder, write_gguf

        chosen = _format_of(out, file_format)
        plan = plan_model(arch, size, layers=layers, rows=rows, seed=seed)
        options = _options(chosen, plan, size, stored=stored, shards=shards, parts=parts, no_trunk=no_trunk)
        write = write_gguf if chosen is Format.gguf else write_folder
        with _progress_bar() as bar:
            task = bar.add_task("", total=None)
            options["progress"] = lambda written: bar.update(task, completed=written)
            paths = write(plan, out, trunk=trunk or _TRUNKS[size], overwrite=force, **options)
    except LazyIOError as error:
        typer.echo(f"make_model: error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"make_model: error: can't write {error.filename or out}: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    typer.echo(_report(plan, paths, time.monotonic() - started))


def _format_of(out: Path, asked: Format | None) -> Format:
    """The format asked for, else the one that the name tells. A name and a request that differ are refused."""
    named = Format.gguf if out.suffix == ".gguf" else None
    if asked is Format.folder and named:
        raise SettingError(f"--format {asked} contradicts the name {out.name}; change one of them")
    return asked or named or Format.folder


def _options(
    chosen: Format, plan: Plan, size: str, *, stored: str | None, shards: int | None, parts: int | None, no_trunk: bool
) -> dict[str, Any]:
    """What the writer of the format takes. What it does not take, or would be without effect, is refused."""
    has_ngrams = plan.table is not None and plan.table.ngram is not None
    _refuse("--type", stored is not None and plan.table is None, f"{plan.architecture} has no table")
    _refuse("--shards", shards is not None and not has_ngrams, f"{plan.architecture} has no table of n-grams")
    options: dict[str, Any] = {} if stored is None else {"table": stored}
    if chosen is Format.gguf:
        _refuse("--shards", shards is not None, "it is for folders, and a GGUF file is to be written")
        _refuse("--no-trunk", no_trunk, "it is for folders, and a GGUF file is to be written")
        return options | {"parts": 1 if parts is None else parts}
    _refuse("--parts", parts is not None, "it is for GGUF files, and a folder is to be written")
    usual = 4 if size == "tiny" else 128
    return options | {"shards": usual if shards is None else shards, "with_trunk": not no_trunk}


def _refuse(option: str, given: bool, why: str) -> None:
    if given:
        raise SettingError(f"{option} can't be followed: {why}; leave it out")


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _report(plan: Plan, paths: tuple[Path, ...], seconds: float) -> str:
    size_bytes = sum(path.stat().st_size for path in paths)
    where = paths[0] if paths[0].suffix == ".gguf" else paths[0].parent
    others = f" and {len(paths) - 1} more" if paths[0].suffix == ".gguf" and len(paths) > 1 else ""
    table = plan.table
    rows = f", a table of {table.rows} rows of {table.row_values} values" if table else ""
    return (
        f"wrote {where}{others}: {plan.architecture} of {plan.config['num_hidden_layers']} layers{rows}, "
        f"{format_bytes(size_bytes)} in {seconds:.1f} s"
    )


if __name__ == "__main__":
    app()
