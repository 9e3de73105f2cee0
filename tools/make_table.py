"""Make a table of any number of rows: a GGUF file, whole or in parts, or safetensors, in one file or a folder.

    python tools/make_table.py OUT.gguf --rows 48000000 --type IQ4_NL
    python tools/make_table.py OUT.gguf --rows 320001536 --type Q8_0 --parts 3 --vocab 248320 --sparse
    python tools/make_table.py OUT.gguf --arch gemma4 --rows 262144 --type Q5_K
    python tools/make_table.py FOLDER --rows 1000000 --type F8_E4M3 --shards 128 --files 32

The bytes of row r follow from r alone. Words of 8 bytes, little-endian, start at its first byte, the last one cut
short; word k is splitmix64(r) * (2 * k + 1) modulo 2**64 with bit 6 of each byte cleared. Over the last 16 bytes, r is
written in decimal ASCII digits with zeros in front. `lazyio.ple.synthetic.expected_rows` gives the same rows in Python.
"""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

# In a checkout that is not installed, the package lies beside this folder; one that is installed comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from lazyio.errors import LazyIOError, SettingError
from lazyio.ple.synthetic import row_bytes_of, write_gguf, write_safetensors
from lazyio.ple.synthetic.models import model_of
from lazyio.units import format_bytes

app = typer.Typer(add_completion=False)


class Format(StrEnum):
    gguf = "gguf"
    safetensors = "safetensors"


class Architecture(StrEnum):
    qwen4exp = "qwen4exp"
    gemma4 = "gemma4"
    gemma3n = "gemma3n"


@app.command()
def make_table(
    out: Annotated[Path, typer.Argument(help="A .gguf or .safetensors file, or a folder for safetensors.")],
    rows: Annotated[int, typer.Option(help="Rows of the table.")],
    stored: Annotated[
        str | None, typer.Option("--type", help="Type of the values (unset: IQ4_NL, in safetensors BF16).")
    ] = None,
    row_values: Annotated[int | None, typer.Option(help="Values of a row (unset: what the architecture has).")] = None,
    arch: Annotated[Architecture, typer.Option(help="The model to look like.")] = Architecture.qwen4exp,
    file_format: Annotated[Format | None, typer.Option("--format", help="Unset: as the name of OUT says.")] = None,
    parts: Annotated[int | None, typer.Option(help="gguf: parts of a split file (unset: 1).")] = None,
    vocab: Annotated[int | None, typer.Option(help="gguf: tokens of a vocabulary (unset: none).")] = None,
    shards: Annotated[
        int | None, typer.Option(help="safetensors: tensors of the table (unset: 128, for Gemma 1).")
    ] = None,
    files: Annotated[int | None, typer.Option(help="safetensors: files in the folder (unset: 1).")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Leave the rows as holes, which read as zeros.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Make a table whose rows can be checked from their number alone."""
    started = time.monotonic()
    try:
        chosen = _format_of(out, file_format)
        options = _options_of(
            chosen, gguf={"parts": parts, "vocab": vocab}, safetensors={"shards": shards, "files": files}
        )
        write, usual = (write_gguf, "IQ4_NL") if chosen is Format.gguf else (write_safetensors, "BF16")
        dtype = stored or usual
        values = model_of(arch, rows, row_values).row_values
        total_bytes = rows * row_bytes_of(dtype, values)
        with _progress_bar(hidden=sparse) as bar:
            task = bar.add_task("", total=total_bytes)
            paths = write(
                out,
                rows,
                dtype,
                values,
                architecture=arch,
                sparse=sparse,
                overwrite=force,
                progress=lambda written: bar.update(task, completed=written),
                **options,
            )
    except LazyIOError as error:
        typer.echo(f"make_table: error: {error}", err=True)
        raise typer.Exit(2) from None
    seconds = time.monotonic() - started
    others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    how = "as holes" if sparse else f"at {format_bytes(total_bytes / seconds)}/s"
    typer.echo(
        f"wrote {paths[0]}{others}: {rows} rows of {total_bytes // rows} bytes ({values} values of {dtype}), "
        f"{format_bytes(total_bytes)} in {seconds:.1f} s, {how}"
    )


def _format_of(out: Path, asked: Format | None) -> Format:
    """The format asked for, else the one that the name tells. A name and a request that differ are refused."""
    named = {".gguf": Format.gguf, ".safetensors": Format.safetensors}.get(out.suffix)
    if asked and named and asked is not named:
        raise SettingError(f"--format {asked} contradicts the name {out.name}; change one of them")
    return asked or named or Format.safetensors


def _options_of(chosen: Format, **options: dict[str, int | None]) -> dict[str, Any]:
    """The options given for the chosen format. One given for the other is refused."""
    for name, values in options.items():
        for option, value in values.items():
            if name != chosen and value is not None:
                raise SettingError(f"--{option} is for {name}, and a {chosen} table is to be written; leave it out")
    return {option: value for option, value in options[chosen].items() if value is not None}


def _progress_bar(hidden: bool) -> Progress:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)


if __name__ == "__main__":
    app()
