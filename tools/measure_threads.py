"""What threads cost each other: a prefetch beside a busy main thread, and eight gathers at once.

    python tools/measure_threads.py TABLE

TABLE is one of tools/make_table.py, larger than what is asked of it. The main thread runs tiny torch operations, which
is what a model does that is bound by launches: it asks for the interpreter lock all the time. Reads are direct, of rows
that were not asked for before. Arms take turns, alone and together; each ratio is of one round.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import lazyio
from lazyio.ple.synthetic import expected_rows

_UBATCH_ROWS = 32768
_OPS_A_LOOK = 200


def main(
    path: Annotated[Path, typer.Argument(help="A table of tools/make_table.py.")],
    rounds: Annotated[int, typer.Option(help="Rounds of every arm.")] = 6,
    ubatches: Annotated[int, typer.Option(help="Ubatches of 32,768 rows an arm.")] = 4,
    threads: Annotated[int, typer.Option(help="Gathers at once.")] = 8,
    device: Annotated[str, typer.Option(help="Of the torch operations: cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    random = np.random.default_rng(0)
    results: list[dict[str, float]] = []
    with lazyio.open_table(path, mode="uring", strict=True, row_cache=0) as table:

        def fresh() -> list[np.ndarray]:
            return [random.integers(0, table.n_rows, _UBATCH_ROWS) for _ in range(ubatches)]

        busy = _Busy(device)
        for number in range(rounds):
            arms = {
                "read": lambda: _read(table, fresh(), None)[0],
                "both": lambda: _read(table, fresh(), busy),
                "main": lambda: busy.run_for(0.5),
                "one": lambda: _gather(table, fresh(), 1),
                "many": lambda: _gather(table, fresh(), threads),
            }
            order = list(arms) if number % 2 == 0 else list(arms)[::-1]
            got = {name: arms[name]() for name in order}
            results.append(
                {
                    "reads kept beside a busy main thread": got["both"][0] / got["read"],
                    "main thread's speed kept beside reads": got["both"][1] / got["main"],
                    f"{threads} threads over one": got["many"] / got["one"],
                }
            )
    _report(results)
    if out is not None:
        out.write_text(json.dumps({"device": device, "rounds": results}, indent=1) + "\n")


class _Busy:
    """A loop of tiny torch operations."""

    def __init__(self, device: str) -> None:
        import torch  # a benchmark's, not the package's

        self._torch = torch
        self._x = torch.zeros(64, device=device)

    def some(self) -> None:
        x = self._x
        for _ in range(_OPS_A_LOOK):
            x = self._torch.tanh(x + 1.0)

    def run_for(self, seconds: float) -> float:
        """Operations a second, alone."""
        start, looks = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            self.some()
            looks += 1
        return looks * _OPS_A_LOOK / (time.perf_counter() - start)


def _read(table: lazyio.LazyTable, ubatches: list[np.ndarray], busy: _Busy | None) -> tuple[float, float]:
    """Rows a second of prefetches, and operations a second of the main thread meanwhile."""
    start, looks = time.perf_counter(), 0
    tickets = [table.prefetch(ids) for ids in ubatches]
    while busy is not None and not tickets[-1].done():
        busy.some()
        looks += 1
    for ids, ticket in zip(ubatches, tickets, strict=True):
        rows, inverse = ticket.result()
        _check(ids, rows[inverse[:64]])
    spent = time.perf_counter() - start
    return _UBATCH_ROWS * len(ubatches) / spent, looks * _OPS_A_LOOK / spent


def _gather(table: lazyio.LazyTable, ubatches: list[np.ndarray], threads: int) -> float:
    """Rows a second of gathers from so many threads, all their rows checked afterwards."""
    parts = [part for ids in ubatches for part in np.array_split(ids, 8)]
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        rows = list(pool.map(table.gather, parts))
        spent = time.perf_counter() - start
    for ids, got in zip(parts, rows, strict=True):
        np.testing.assert_array_equal(got, expected_rows(ids))
    return sum(map(len, parts)) / spent


def _check(ids: np.ndarray, rows: np.ndarray) -> None:
    np.testing.assert_array_equal(rows, expected_rows(ids[: len(rows)]))


def _report(results: list[dict[str, float]]) -> None:
    table = Table(title=f"{len(results)} rounds")
    for column in ("", "median", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for name in results[0]:
        values = np.array([result[name] for result in results])
        table.add_row(name, *(f"{value:.2f}" for value in (np.median(values), values.min(), values.max())))
    Console().print(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except (lazyio.LazyIOError, ModuleNotFoundError) as error:
        raise SystemExit(f"measure_threads: error: {error}") from None
