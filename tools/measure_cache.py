"""Measure the row cache: what it saves, what a hit costs, what its file saves on text it was not made from.

    python tools/make_table.py table.gguf --rows 48000000 --sparse
    python tools/measure_cache.py table.gguf ids.npy

The table is one of n-grams, and `ids.npy` has the token ids of a text. A sparse table will do: what is counted does not
depend on the bytes of rows, nor does the time of a hit.
"""

from __future__ import annotations

import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from lazyio import LazyIOError, LazyTable, TableSpec, find_table, open_table, row_ids_of
from lazyio.fetchers.base import Int64
from lazyio.ple.cache import RowCache

MIB = 1 << 20
OPENED = {"mode": "uring", "direct_io": "on", "strict": True}
console = Console()


def main(
    path: Annotated[Path, typer.Argument(help="A table of n-grams.")],
    ids: Annotated[Path, typer.Argument(help="Token ids of a text, .npy.")],
    budgets: Annotated[str, typer.Option(help="MiB of caches to compare.")] = "8,16,32,64,256",
    ubatch: Annotated[int, typer.Option(help="Tokens of a ubatch, for what is saved.")] = 512,
    warm_ubatch: Annotated[int, typer.Option(help="Tokens of a ubatch, for the time of a hit.")] = 2048,
    warm_tokens: Annotated[int, typer.Option(help="Tokens of the warm passes.")] = 16_384,
    rounds: Annotated[int, typer.Option(help="Warm passes.")] = 9,
    plot: Annotated[Path | None, typer.Option(help="Draw what is saved to this .png file.")] = None,
) -> None:
    spec = find_table(path)
    rows = row_ids_of(spec)(np.load(ids))
    saved = saved_by_policy(spec, cut(rows, ubatch), [int(text) for text in budgets.split(",")])
    if plot is not None:
        draw(saved, plot)
    cost_of_a_hit(spec, cut(rows[:warm_tokens], warm_ubatch), rounds)
    cost_of_a_step(spec, list(np.random.default_rng(0).integers(0, spec.rows, (2000, rows.shape[1]))))
    saved_on_another_text(spec, cut(rows[: len(rows) // 2], ubatch), cut(rows[len(rows) // 2 :], ubatch))


def cut(rows: Int64, tokens: int) -> list[Int64]:
    return [rows[start : start + tokens].reshape(-1) for start in range(0, len(rows), tokens)]


# --- what is saved ----------------------------------------------------------------------------------------------------


def saved_by_policy(spec: TableSpec, ubatches: list[Int64], budgets: list[int]) -> dict[int, dict[str, float]]:
    """Reads that caches of several kinds save, in percent of what one without bounds saves, by MiB and kind."""
    unique = [np.unique(ids) for ids in ubatches]
    without, unbounded = sum(map(len, unique)), len(np.unique(np.concatenate(unique)))
    console.print(f"{without:,} rows read without a cache, {unbounded:,} with one that has no bounds")
    columns: dict[int, dict[str, float]] = {}
    for budget in budgets:
        cache = RowCache(spec.rows, spec.row_bytes, budget * MIB)
        places = cache.stats().capacity_rows
        missed = {
            "row cache": misses_of(cache, unique, spec.row_bytes),
            "one list, LRU": one_list(unique, places, renews=True),
            "one list, FIFO": one_list(unique, places, renews=False),
            **{
                f"sets of {ways}, {policy}": in_sets(unique, places, ways, policy)
                for ways in (4, 8, 16)
                for policy in ("LRU", "CLOCK", "FIFO")
            },
        }
        columns[budget] = {kind: 100 * (without - count) / (without - unbounded) for kind, count in missed.items()}
    headings = [f"{budget} MiB" for budget in columns]
    table = Table("", *headings, title="saved, in percent of what a cache without bounds saves")
    for kind in missed:
        table.add_row(kind, *(f"{column[kind]:.1f}" for column in columns.values()))
    console.print(table)
    return columns


def draw(saved: dict[int, dict[str, float]], path: Path) -> None:
    """A line for the row cache and for a few of the others."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    lines = {"row cache": "o-", "one list, LRU": "s--", "sets of 8, CLOCK": "^:", "one list, FIFO": "v:"}
    for kind, style in lines.items():
        axes.plot(list(saved), [column[kind] for column in saved.values()], style, label=kind, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(saved), [str(budget) for budget in saved])
    axes.set_xlabel("MiB of cache")
    axes.set_ylabel("reads saved, % of what no bounds save")
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def misses_of(cache: RowCache, unique: list[Int64], row_bytes: int) -> int:
    missed = 0
    for ids in unique:
        missing = ids[cache.take(ids, np.empty((len(ids), row_bytes), np.uint8))]
        cache.insert(missing, np.zeros((len(missing), row_bytes), np.uint8))
        missed += len(missing)
    return missed


def one_list(unique: list[Int64], places: int, *, renews: bool) -> int:
    """One list of all rows, in order of their last use, or else of their coming."""
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for ids in unique:
        for row in ids.tolist():
            if row not in held:
                held[row] = None
                missed += 1
            elif renews:
                held.move_to_end(row)
        while len(held) > places:
            held.popitem(last=False)
    return missed


def in_sets(unique: list[Int64], places: int, ways: int, policy: str) -> int:
    """Sets of `ways` places, in which the next to go is told by exact times, by a bit and a hand, or by a hand."""
    sets, missed = places // ways, 0
    tags = np.full((sets, ways), -1, np.int64)
    used, hand = np.zeros((sets, ways), np.int64), np.zeros(sets, np.int64)
    for now, ids in enumerate(unique, 1):
        home = ((ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> 32) * np.uint64(sets) >> 32).astype(np.int64)
        match = tags[home] == ids[:, None]
        hit = match.any(axis=1)
        used[home[hit], match[hit].argmax(axis=1)] = now
        missed += int(np.count_nonzero(~hit))
        order = home[~hit].argsort(kind="stable")
        new, home = ids[~hit][order], home[~hit][order]
        rank = np.arange(len(home)) - home.searchsorted(home)
        new, home, rank = new[rank < ways], home[rank < ways], rank[rank < ways]
        turn = (np.arange(ways) - hand[home][:, None]) % ways
        key = {"LRU": used[home], "CLOCK": turn + ways * (used[home] > 0), "FIFO": turn}[policy]
        way = key.argsort(axis=1, kind="stable")[np.arange(len(home)), rank]
        if policy == "CLOCK":
            used[home] = 0
        last = np.append(home[1:] != home[:-1], [True] * bool(len(home)))
        hand[home[last]] = (way[last] + 1) % ways
        tags[home, way], used[home, way] = new, now if policy == "LRU" else 0
    return missed


# --- what a hit costs -------------------------------------------------------------------------------------------------


def cost_of_a_hit(spec: TableSpec, ubatches: list[Int64], rounds: int) -> None:
    """Gather rows that are held, and take them with numpy from an array as large as the table, in turns."""
    array = np.zeros((spec.rows, spec.row_bytes), np.uint8)
    outs = [np.empty((len(ids), spec.row_bytes), np.uint8) for ids in ubatches]
    with open_table(spec, **OPENED) as table:
        for ids in ubatches:
            array[ids] = table.gather(ids)
        before, pairs = table.stats(), []
        for number in range(rounds):
            for ids, out in zip(ubatches, outs, strict=True):
                sides = {
                    "take": lambda ids=ids, out=out: np.take(array, ids, axis=0, out=out, mode="clip"),
                    "gather": lambda ids=ids, out=out: table.gather(ids, out),
                }
                order = sorted(sides, reverse=number % 2 == 0)
                seconds = {side: cpu_s(sides[side]) / len(ids) for side in order}
                pairs.append((seconds["take"], seconds["gather"]))
        reads = (table.stats() - before).reads
    take, gather = np.array(pairs).T
    low, middle, high = np.percentile(gather / take, [25, 50, 75])
    console.print(
        f"warm, {reads} reads: np.take {1e9 * np.median(take):.0f} ns a row, gather {1e9 * np.median(gather):.0f} ns, "
        f"ratio {middle:.2f} (half of {len(pairs)} pairs in {low:.2f} to {high:.2f})"
    )


def cost_of_a_step(spec: TableSpec, steps: list[Int64]) -> None:
    """Gather the rows of one token: without a cache, with one that does not have them, with one that does."""
    with open_table(spec, **OPENED, row_cache=0) as bare, open_table(spec, **OPENED) as table:
        sides = [(bare, []), (table, []), (table, [])]
        for ids in steps:
            for side, seconds in sides:
                seconds.append(cpu_s(lambda side=side, ids=ids: side.gather(ids)))
    without, missed, hit = (1e6 * np.median(seconds) for _, seconds in sides)
    console.print(
        f"{len(steps[0])} rows: {without:.0f} us without a cache (and without the device), {missed:.0f} where they are "
        f"missed, {hit:.0f} where they are held"
    )


def cpu_s(work: Callable[[], object]) -> float:
    """Time of the processor: nothing is waited for, and what else the machine does shall not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


# --- what a file saves ------------------------------------------------------------------------------------------------


def saved_on_another_text(spec: TableSpec, first: list[Int64], second: list[Int64]) -> None:
    """Rows read for the second half of a text: without a cache, with one, and with one that knows the first half."""
    with tempfile.TemporaryDirectory() as folder, open_table(spec, **OPENED) as table:
        read_rows(table, first)
        file = Path(folder) / "hot.rows"
        started = time.perf_counter()
        count = table.cache.save(file)
        saving, size = time.perf_counter() - started, file.stat().st_size
        with open_table(spec, **OPENED, row_cache=0) as other:
            without = read_rows(other, second)
        with open_table(spec, **OPENED) as other:
            empty = read_rows(other, second)
        with open_table(spec, **OPENED) as other:
            started = time.perf_counter()
            other.cache.load(file)
            loading = time.perf_counter() - started
            loaded = read_rows(other, second)
    console.print(
        f"a file of {count:,} rows of the first half, {size / MIB:.0f} MiB, saved in {saving:.2f} s, loaded in "
        f"{loading:.2f} s; rows read for the second half: {without:,} without a cache, {empty:,} with an empty one, "
        f"{loaded:,} with the file: {100 * (1 - loaded / empty):.0f} % fewer than with an empty one"
    )


def read_rows(table: LazyTable, ubatches: list[Int64]) -> int:
    for ids in ubatches:
        table.gather(ids)
    return table.stats().unique_rows


if __name__ == "__main__":
    try:
        typer.run(main)
    except (LazyIOError, ModuleNotFoundError) as error:
        raise SystemExit(f"measure_cache: error: {error}") from None
