"""Bring the rows of an MLX table together, so that each can be read with one read.

    python tools/interleave.py MODEL NEW_FOLDER

MODEL is a safetensors file, its index or a folder, whose per-layer embedding table MLX has quantised: numbers, scales
and biases in three tensors, or in three for each shard. NEW_FOLDER gets one file with a row after the other, each its
numbers, then its scales, then its biases, together with the constants of the row ids and the model's config.json. It is
opened like any model. The values stay what they are, bit by bit, and as many bytes. Memory for a few MiB is enough.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

# In a checkout that is not installed, the package lies beside this folder; one that is installed comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from lazyio.errors import LazyIOError, NeverFits, SettingError, TableError
from lazyio.ple.checkpoint import SourceFile, StoredTensor, read_tensor
from lazyio.ple.dtypes import MLX_TYPES
from lazyio.ple.mlx import USUAL_GROUP, MlxType, mlx_type_of
from lazyio.ple.safetensors import SafetensorsCheckpoint, constants_of, open_safetensors
from lazyio.ple.safetensors_header import read_json
from lazyio.ple.shards import check_numbers, group_shards
from lazyio.ple.tables import is_ple_name
from lazyio.units import format_bytes

app = typer.Typer(add_completion=False)

_FILE = "table.safetensors"
_STEP_BYTES = 4 << 20

Shard = tuple[StoredTensor, StoredTensor, StoredTensor]  # numbers, scales, biases


@dataclass(frozen=True, slots=True)
class SplitTable:
    """A table whose rows are in three places."""

    name: str  # of the tensor of its numbers, without ".weight"
    kind: MlxType
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        return sum(numbers.shape[0] for numbers, _, _ in self.shards)

    @property
    def row_bytes(self) -> int:
        return self.shards[0][1].shape[1] * MLX_TYPES[self.kind.name].block_bytes


@app.command()
def interleave(
    model: Annotated[Path, typer.Argument(help="A safetensors file, an index, or the folder of a model.")],
    folder: Annotated[Path, typer.Argument(metavar="NEW_FOLDER", help="Where the table goes; made if need be.")],
    tensor: Annotated[
        str | None, typer.Option(help="The table, such as T.weight (unset: the per-layer embedding table).")
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=1, help=f"Values of a group (unset: as config.json says, else {USUAL_GROUP}).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing table.")] = False,
) -> None:
    """Write an MLX table again, each row in one place."""
    started = time.monotonic()
    try:
        checkpoint = open_safetensors(os.fspath(model))
        table = find_split_table(checkpoint, tensor, group)
        with _progress_bar() as bar:
            task = bar.add_task("", total=table.rows * table.row_bytes)
            write_table(checkpoint, table, folder, force, lambda written: bar.update(task, completed=written))
    except LazyIOError as error:
        typer.echo(f"interleave: error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"interleave: error: can't write {error.filename or folder}: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    typer.echo(
        f"wrote {folder / _FILE}: {table.rows} rows of {table.row_bytes} bytes ({table.kind.name}), "
        f"{format_bytes(table.rows * table.row_bytes)} in {time.monotonic() - started:.1f} s"
    )


def find_split_table(checkpoint: SafetensorsCheckpoint, tensor: str | None, group: int | None) -> SplitTable:
    """The quantised table of that name, or the one per-layer embedding table. Raises TableError."""
    tables = {
        name: parts
        for name, parts in group_shards(checkpoint.names).items()
        if name.endswith(".weight") and all(_beside(part, "biases") in checkpoint.names for part in parts)
    }
    wanted = [
        name for name in tables if (is_ple_name(name) if tensor is None else name in (tensor, f"{tensor}.weight"))
    ]
    if len(wanted) != 1:
        asked = "per-layer embedding table" if tensor is None else f"table {tensor}"
        raise TableError(
            f"{checkpoint.path} has {len(wanted) or 'no'} {asked} in MLX's layout of weight, scales and biases; in it "
            f"are: {', '.join(list(tables)[:8]) or 'none'}"
        )
    (name,) = wanted
    if tables[name] != (name,):
        check_numbers(checkpoint, name, tables[name])
    shards = [_shard(checkpoint, part) for part in tables[name]]
    size = group or _group_in_config(checkpoint, tables[name][0].removesuffix(".weight"))
    kinds = {(mlx_type_of(*shard, size), shard[0].shape[1]) for shard in shards}
    if len(kinds) > 1:
        raise TableError(f"{checkpoint.path}: shards of {name} are not alike; they can't be one table")
    return SplitTable(name.removesuffix(".weight"), kinds.pop()[0], tuple(shards))


def _beside(part: str, what: str) -> str:
    return f"{part.removesuffix('.weight')}.{what}"


def _shard(checkpoint: SafetensorsCheckpoint, part: str) -> Shard:
    scales = _beside(part, "scales")
    if scales not in checkpoint.names:
        raise TableError(f"{checkpoint.path} lacks {scales}, without which {part} can't be decoded")
    return checkpoint.tensor(part), checkpoint.tensor(scales), checkpoint.tensor(_beside(part, "biases"))


def _group_in_config(checkpoint: SafetensorsCheckpoint, module: str) -> int:
    """Values of a group as config.json has them for a module or for all; the usual where it says nothing."""
    path = checkpoint.folder / "config.json"
    quantization = read_json(str(path)).get("quantization") if path.exists() else None
    if not isinstance(quantization, dict):
        return USUAL_GROUP
    own = quantization.get(module)
    said = (own if isinstance(own, dict) else quantization).get("group_size", USUAL_GROUP)
    if not isinstance(said, int) or said < 1:
        raise TableError(f"{path}: group_size is {said!r} and should be a number of values; give --group")
    return said


def write_table(
    checkpoint: SafetensorsCheckpoint,
    table: SplitTable,
    folder: Path,
    force: bool,
    progress: Callable[[int], None] = lambda written: None,
) -> None:
    """Write the table, the constants of its row ids and config.json to a folder; whole, or not at all.

    Raises SettingError if the folder has a table and `force` is not set, NeverFits if the disk has too little room.
    """
    target = folder / _FILE
    if target.exists() and not force:
        raise SettingError(f"{target} exists; give another folder, or --force")
    if folder.resolve() == checkpoint.folder.resolve():
        raise SettingError(f"{folder} is the model's own folder, where the table would be there twice; give another")
    folder.mkdir(exist_ok=True)
    table_bytes = table.rows * table.row_bytes
    free = shutil.disk_usage(folder).free
    if table_bytes > free:
        raise NeverFits(f"{target} needs {format_bytes(table_bytes)} and {folder} has {format_bytes(free)} free")
    partial = folder / f".{_FILE}.{os.getpid()}.partial"
    try:
        with partial.open("xb") as out:
            out.write(_head(checkpoint, table))
            written = 0
            for rows in _interleaved(table):
                written += out.write(rows)
                progress(written)
            out.flush()
            os.fsync(out.fileno())
        config = checkpoint.folder / "config.json"
        if config.exists() and config.resolve() != (folder / "config.json").resolve():
            shutil.copyfile(config, folder / "config.json")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _head(checkpoint: SafetensorsCheckpoint, table: SplitTable) -> bytes:
    """All of the file before the rows: its header, and the constants."""
    constants = [checkpoint.tensor(name) for name in constants_of(f"{table.name}.weight") if name in checkpoint.names]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for tensor in constants:
        content = read_tensor(tensor)
        header[tensor.name] = _entry(tensor.dtype, tensor.shape, len(data), len(content))
        data += content
    shape = (table.rows, table.row_bytes)
    header[f"{table.name}.{table.kind.name.lower()}"] = _entry("U8", shape, len(data), table.rows * table.row_bytes)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _entry(dtype: str, shape: Sequence[int], start: int, size_bytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size_bytes]}


def _interleaved(table: SplitTable) -> Iterator[bytes]:
    """The rows of all shards, a few MiB at a time."""
    step = max(1, _STEP_BYTES // table.row_bytes)
    for shard in table.shards:
        with ExitStack() as stack:
            sources = {path: stack.enter_context(SourceFile(path)) for path in {part.path for part in shard}}
            rows = shard[0].shape[0]
            for first in range(0, rows, step):
                last = min(first + step, rows)
                parts = [_rows_of(sources[part.path], part, first, last) for part in shard]
                yield np.concatenate(parts, axis=1).tobytes()


def _rows_of(source: SourceFile, tensor: StoredTensor, first: int, last: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    row_bytes = (tensor.size_bytes or 0) // tensor.shape[0]
    content = source.read(tensor.offset + first * row_bytes, (last - first) * row_bytes)
    return np.frombuffer(content, np.uint8).reshape(last - first, row_bytes)


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    app()
