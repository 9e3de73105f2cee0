"""Holds our reads to fio's, in turns on one file: the raw ring to its io_uring engine, the pool to its psync.

    python tools/fio_pairs.py TABLE --engine io_uring --depth 1024
    python tools/fio_pairs.py TABLE --engine psync --depth 32

Both read random blocks of the file past the page cache, as many a turn, the same number in flight. The turns go
A B B A, so that a disk which slows down does not favour one side; each ratio is that of two neighbouring turns.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import lazyio
from lazyio.fetchers import Extent, FetcherOptions, ReadPlan, load
from lazyio.staging import Staging

_FETCHER = {"io_uring": "uring", "psync": "pread"}


def main(
    path: Annotated[Path, typer.Argument(help="A file of several GiB, such as a table of tools/make_table.py.")],
    engine: Annotated[str, typer.Option(help="fio's engine: io_uring or psync.")] = "io_uring",
    depth: Annotated[int, typer.Option(help="Reads in flight; of psync, jobs.")] = 1024,
    block: Annotated[int, typer.Option(help="Bytes of a read.")] = 512,
    reads: Annotated[int, typer.Option(help="Reads a turn.")] = 32768,
    rounds: Annotated[int, typer.Option(help="Pairs of turns.")] = 6,
    fio: Annotated[str, typer.Option(help="The program.")] = "fio",
    least_iops: Annotated[int, typer.Option(help="Pairs in which fio stays below are shown and not counted.")] = 0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    if engine not in _FETCHER:
        raise typer.BadParameter(f"{engine}: it can be io_uring or psync")
    if shutil.which(fio) is None:
        raise typer.BadParameter(f"{fio} is not to be found; install the package fio")
    turns = []
    for number in range(rounds):
        order = ("fio", "ours") if number % 2 == 0 else ("ours", "fio")
        rates = {}
        for side in order:
            rates[side] = (
                _run_fio(fio, path, engine, depth, block, reads)
                if side == "fio"
                else _run_ours(path, engine, depth, block, reads, seed=number)
            )
        turns.append({**rates, "ratio": rates["ours"] / rates["fio"], "counted": rates["fio"] >= least_iops})
    _report(turns, engine, depth, block, reads)
    if out is not None:
        what = {"engine": engine, "depth": depth, "block_bytes": block, "reads": reads, "lazyio": lazyio.__version__}
        out.write_text(json.dumps({**what, "turns": turns}, indent=1) + "\n")


def _run_ours(path: Path, engine: str, depth: int, block: int, reads: int, seed: int) -> float:
    blocks = path.stat().st_size // block
    offset = np.random.default_rng(seed).integers(0, blocks, reads) * block
    length = np.full(reads, block)
    plan = ReadPlan(np.zeros(reads, np.int32), offset, length, length, np.arange(reads) * block, reads * block)
    options = FetcherOptions(direct_io="on", queue_depth=depth, workers=depth, block_bytes=block)
    extent = Extent(str(path), 0, 0, blocks)
    staging = Staging(reads * block + (1 << 20))
    with load(_FETCHER[engine])([extent], block, options) as fetcher, staging.lease(reads * block) as buffer:
        if not fetcher.direct_io:
            raise typer.BadParameter(f"{path}: {fetcher.fell_back}")
        buffer[:] = 0  # fault the memory in: fio's buffers are, too
        started = time.perf_counter()
        fetcher.read(plan, buffer)
        return reads / (time.perf_counter() - started)


def _run_fio(fio: str, path: Path, engine: str, depth: int, block: int, reads: int) -> float:
    jobs, in_flight = (depth, 1) if engine == "psync" else (1, depth)
    command = [
        fio, "--name=pair", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1", "--thread",
        f"--bs={block}", f"--ioengine={engine}", f"--numjobs={jobs}", f"--iodepth={in_flight}", "--norandommap",
        f"--number_ios={reads // jobs}", "--group_reporting", "--output-format=json", "--randrepeat=0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if done.returncode:
        raise typer.BadParameter(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"])


def _report(turns: list[dict[str, float]], engine: str, depth: int, block: int, reads: int) -> None:
    fetcher = _FETCHER[engine]
    table = Table(title=f"{fetcher} and fio {engine}, {depth} in flight, {block} B, {reads} reads a turn")
    for column in ("pair", "fio reads/s", f"{fetcher} reads/s", "ratio", ""):
        table.add_column(column, justify="right")
    for number, turn in enumerate(turns):
        note = "" if turn["counted"] else "not counted"
        table.add_row(f"{number + 1}", f"{turn['fio']:,.0f}", f"{turn['ours']:,.0f}", f"{turn['ratio']:.3f}", note)
    console = Console()
    console.print(table)
    counted = np.array([turn["ratio"] for turn in turns if turn["counted"]])
    if len(counted):
        spread = f"[{counted.min():.3f}, {counted.max():.3f}]"
        console.print(f"median ratio {np.median(counted):.3f} {spread}, n = {len(counted)}")


if __name__ == "__main__":
    typer.run(main)
