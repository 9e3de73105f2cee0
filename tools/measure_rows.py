"""Measure the row kernel on a GPU, each stored type beside a copy that moves as many bytes.

    python tools/measure_rows.py
    python tools/measure_rows.py --types IQ4_NL,EXL3_K4 --dtype float32

Every row asked for is another one, in random order, which is the most a gather can bring. Kernels and copies are
replayed from CUDA graphs, taking turns, over as many buffers as it takes for none to be in the L2 cache from its last
turn. A type whose values are not those of the reference gets no figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"measure_rows: error: kernels are measured with torch and Triton: {error}") from None

from lazyio.kernels.expand_rows import SUPPORTED, expand_rows, reference
from lazyio.kernels.measuring import the_gpu
from lazyio.ple.dtypes import EXL3_TYPES, TYPES

# More than any L2 cache holds.
BEYOND_CACHE_BYTES = 256 << 20
MOST_SETS = 32
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHORT, LONG = 160, 8960  # values of a row, of n-gram tables and of Gemma's
console = Console(width=120)


def main(
    types: Annotated[str, typer.Option(help="Stored types, with commas between.")] = ",".join(sorted(SUPPORTED)),
    rows: Annotated[int, typer.Option(help="Rows of a launch.")] = 32_768,
    dtype: Annotated[str, typer.Option(help=f"Of the values: {', '.join(DTYPES)}.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Replays of each, of which the median counts.")] = 21,
) -> None:
    the_gpu()
    table = Table(title=f"{torch.cuda.get_device_name()}, {rows} rows to {dtype}")
    for heading in ("type", "values", "row bytes", "us", "GB/s", "copy GB/s", "of copy"):
        table.add_column(heading, justify="left" if heading == "type" else "right")
    for stored in types.split(","):
        for values in lengths(stored):
            table.add_row(*measured(stored, values, rows, DTYPES[dtype], rounds))
    console.print(table)


def lengths(stored: str) -> list[int]:
    """The lengths of rows that a type is measured with: those that its blocks can make up."""
    if stored in EXL3_TYPES:
        return [SHORT]
    return [LONG] if SHORT % TYPES[stored].block_values else [SHORT, LONG]


def measured(stored: str, values: int, rows: int, dtype: torch.dtype, rounds: int) -> list[str]:
    row_bytes = TYPES[stored].row_bytes(values)
    moved = rows * (row_bytes + 8 + values * dtype.itemsize)
    sets = min(MOST_SETS, math.ceil(BEYOND_CACHE_BYTES / moved))
    packed = [torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    inverse = torch.randperm(rows, device="cuda")
    out = torch.empty(sets, rows, values, dtype=dtype, device="cuda")
    head = [stored, f"{values}", f"{row_bytes}"]
    if not right(packed[0], inverse, stored, out[0]):
        return [*head, "wrong values", "", "", ""]
    copied = torch.empty(sets, 2, moved // 2, dtype=torch.uint8, device="cuda")
    kernel = graph(lambda i: expand_rows(packed[i], inverse, stored, out[i]), sets)
    copy = graph(lambda i: copied[i, 1].copy_(copied[i, 0]), sets)
    kernel_ms, copy_ms = (ms / sets for ms in in_turns([kernel, copy], rounds))
    speed, copy_speed = moved / kernel_ms / 1e6, moved / copy_ms / 1e6
    return [*head, f"{kernel_ms * 1e3:.1f}", f"{speed:.0f}", f"{copy_speed:.0f}", f"{speed / copy_speed:.2f}"]


def right(packed: torch.Tensor, inverse: torch.Tensor, stored: str, out: torch.Tensor) -> bool:
    """Whether the first rows are those of the reference; NaNs may be any."""
    few = inverse[:512]
    expected = torch.empty(len(few), out.shape[1], dtype=out.dtype, device=out.device)
    reference(packed[few], torch.arange(len(few), device=out.device), stored, expected)
    expand_rows(packed, inverse, stored, out)
    return torch.equal(out[: len(few)].nan_to_num(7.0), expected.nan_to_num(7.0))


def graph(launch: Callable[[int], object], sets: int) -> torch.cuda.CUDAGraph:
    """One launch on each set of buffers."""
    for number in range(sets):
        launch(number)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for number in range(sets):
            launch(number)
    return made


def in_turns(graphs: list[torch.cuda.CUDAGraph], rounds: int) -> list[float]:
    """Median milliseconds of a replay of each."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for number, replayed in enumerate(graphs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replayed.replay()
            end.record()
            end.synchronize()
            times[number].append(start.elapsed_time(end))
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    typer.run(main)
