"""The table that is measured when none is named: made once, as large as the disk has room for."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lazyio.bench.equal import read_row
from lazyio.errors import LazyIOError, NeverFits
from lazyio.ple.spec import TableSpec
from lazyio.ple.synthetic import expected_rows, write_gguf
from lazyio.ple.tables import find_table
from lazyio.units import format_bytes

DEFAULT_FOLDER = Path("lazyio-demo")
DTYPE, ROW_VALUES, ROW_BYTES = "IQ4_NL", 160, 90
#: From 4 GiB down to a quarter of one.
SIZES = tuple(48_000_000 >> halvings for halvings in range(5))
# A disk is left with twice the table's size free.
_TIMES_FREE = 3


def demo_table(folder: Path | None, console: Console) -> Path:
    """The path of a demo table: the largest complete one in `folder`, else a new one that fits the free space.

    Raises NeverFits where even the smallest does not fit, TableError or OSError where it can't be written.
    """
    folder = folder or DEFAULT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for rows in SIZES:
        if is_complete(path := _path(folder, rows), rows):
            console.print(f"using the demo table {path}", highlight=False, markup=False, soft_wrap=True)
            return path
    free = shutil.disk_usage(folder).free
    fitting = [rows for rows in SIZES if _TIMES_FREE * rows * ROW_BYTES <= free]
    if not fitting:
        raise NeverFits(
            f"the smallest demo table takes {format_bytes(SIZES[-1] * ROW_BYTES)} and asks for {_TIMES_FREE} times "
            f"that free; {folder.resolve()} has {format_bytes(free)}: choose another folder with --demo-dir"
        )
    path = _path(folder, fitting[0])
    _write(path, fitting[0], console)
    return path


def is_complete(path: Path, rows: int) -> bool:
    """Whether a demo table is there and whole: found as a table, with its first and last row as they must be."""
    if not path.exists():
        return False
    try:
        spec: TableSpec = find_table(path)
    except LazyIOError:
        return False
    if (spec.rows, spec.row_bytes) != (rows, ROW_BYTES):
        return False
    ends = np.array([0, rows - 1])
    found = b"".join(read_row(spec, int(row)) for row in ends)
    return found == expected_rows(ends, DTYPE, ROW_VALUES).tobytes()


def _path(folder: Path, rows: int) -> Path:
    return folder / f"demo-{rows}.gguf"


def _write(path: Path, rows: int, console: Console) -> None:
    size = rows * ROW_BYTES
    console.print(f"making a demo table of {format_bytes(size)}: {path}", highlight=False, markup=False, soft_wrap=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=size)
        # What lies there is not whole, or it would be used.
        write_gguf(
            path,
            rows,
            DTYPE,
            ROW_VALUES,
            overwrite=True,
            progress=lambda written: bar.update(task, completed=written),
        )
