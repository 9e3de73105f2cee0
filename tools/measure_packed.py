"""Measure products with packed weights on a GPU, beside the memory's bandwidth and beside weights dequantised first.

    python tools/measure_packed.py
    python tools/measure_packed.py --types Q4_K,Q6_K --shapes 2560x6144 --rows 1,2,4,8,16
    python tools/measure_packed.py --sweep --types Q4_0

Times are those of CUDA graphs which go over several weights, more than the L2 cache holds. Few rows are given with
the share of --bandwidth that the weight's bytes alone take. For more rows three ways are compared: the kernel of few
rows, which takes 16 at a time, a fused kernel, and dequantising with a product of torch's; how long these two take
alone is given too. With --sweep, launches of the kernel of few rows are compared, and for one row those of the kernel
without tensor cores, which have a single stage.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it.
# ruff: noqa: N803

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

try:
    import torch
    import triton
    from triton import language as tl
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench_cudagraph
except ModuleNotFoundError as error:
    raise SystemExit(f"measure_packed: error: kernels are measured with torch and Triton: {error}") from None

from lazyio.kernels import packed, packed_matmul
from lazyio.kernels.measuring import the_gpu
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight
from lazyio.kernels.packed_matmul import Config, dequantise, matmul, reference
from lazyio.kernels.packed_tiles import load_tile

TYPES = "Q4_0,Q4_K,Q5_K,Q6_K,Q8_0,F8_E4M3"
SHAPES = "2560x6144,12288x2560,10240x2560,248320x2560"
console = Console(width=140)


def main(
    types: Annotated[str, typer.Option(help="Stored types, or 'all'.")] = TYPES,
    shapes: Annotated[str, typer.Option(help="Outputs x inputs.")] = SHAPES,
    rows: Annotated[str, typer.Option(help="Few rows.")] = "1,4,8,16",
    many: Annotated[
        str, typer.Option(help="More rows, for the first type and two shapes; empty for none.")
    ] = "32,64,128,256,2048",
    bandwidth: Annotated[float, typer.Option(help="Of the memory, in TB/s.")] = 4.3,
    seconds: Annotated[float, typer.Option(help="After which nothing more is begun.")] = 80,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare launches instead.")] = False,
) -> None:
    the_gpu()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    chosen = sorted(PACKED_TYPES) if types == "all" else types.split(",")
    sizes = [tuple(int(part) for part in shape.split("x")) for shape in shapes.split(",")]
    counts = [int(part) for part in rows.split(",")]
    until = time.monotonic() + seconds
    with torch.inference_mode():
        if sweep:
            for stored, size, count in itertools.product(chosen, sizes, counts):
                sweep_launches(stored, size, count, bandwidth, until)
            return
        measure_few(chosen, sizes, counts, bandwidth, until)
        if many:
            measure_many(chosen[0], sizes[:2], [int(part) for part in many.split(",")], until)


def weights_of(stored: str, size: Sequence[int]) -> list[PackedWeight]:
    """So many that the L2 cache does not have the next one."""
    device = torch.device("cuda", torch.cuda.current_device())
    made = torch.Generator(device).manual_seed(0)
    first = packed.random(stored, size, device, made, 0.02, (128, 128))
    others = max(2, min(32, -(-200_000_000 // first.nbytes)))
    return [first, *(packed.random(stored, size, device, made, 0.02, (128, 128)) for _ in range(others - 1))]


def microseconds(run: Callable[[PackedWeight], object], weights: Sequence[PackedWeight]) -> float:
    """Of one product, in a CUDA graph that goes over all weights."""

    def all_of_them() -> None:
        for weight in weights:
            run(weight)

    return 1e3 * do_bench_cudagraph(all_of_them, rep=20, quantiles=[0.5]) / len(weights)


def rows_of(count: int, size: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, size[1], device="cuda").to(dtype)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


# --- few rows ---------------------------------------------------------------------------------------------------------


def measure_few(
    types: Sequence[str], sizes: Sequence[Sequence[int]], counts: Sequence[int], bandwidth: float, until: float
) -> None:
    table = Table(
        "type", "outputs x inputs", "MB", *(f"{count} rows: us, share" for count in counts), "error", box=None
    )
    for size, stored in itertools.product(sizes, types):
        if time.monotonic() > until:
            console.print(f"out of time before {stored} {size}")
            break
        weights = weights_of(stored, size)
        x = rows_of(max(counts), size)
        error = error_of(matmul(x, weights[0]), reference(x, weights[0]))
        cells = []
        for count in counts:
            took = microseconds(lambda weight, few=x[:count]: matmul(few, weight), weights)
            cells.append(f"{took:.1f}, {weights[0].nbytes / took / 1e6 / bandwidth:.2f}")
        table.add_row(stored, "x".join(map(str, size)), f"{weights[0].nbytes / 1e6:.1f}", *cells, f"{error:.1e}")
    console.print(table)


# --- more rows --------------------------------------------------------------------------------------------------------


@triton.jit
def fused(
    x,
    p0,
    p1,
    p2,
    p3,
    out,
    rows,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the product, of values that are dequantised for it alone."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, live = tl.minimum(n, N - 1), (m < rows)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        values = load_tile(p0, p1, p2, p3, 0, row, k, STORED, N, K, BLOCK_K, ROWS, COLUMNS)
        column = (k + tl.arange(0, BLOCK_K))[:, None]
        some = tl.load(x + m[None, :] * K + column, mask=live & (column < K), other=0.0)
        acc = tl.dot(values.to(some.dtype), some, acc)
    tl.store(out + m[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & live)


def with_fused(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    outputs, inputs = weight.shape
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    rows, columns = weight.block or (1, 1)
    block_m = 64 if len(x) <= 64 else 128
    fused[(-(-outputs // 128), -(-len(x) // block_m))](
        *(x, *weight.pointers(), out, len(x)),
        *(weight.stored, outputs, inputs, rows, columns, block_m, 128, 64),
        num_warps=8,
        num_stages=3,
    )
    return out


def in_pieces(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    config = next(config for least, config in packed_matmul.NARROW if weight.shape[0] >= least)
    return launched_as(config, x, weight)


def dequantised_first(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return x @ dequantise(weight, x.dtype).t()


def measure_many(stored: str, sizes: Sequence[Sequence[int]], counts: Sequence[int], until: float) -> None:
    ways = {"dequantised first": dequantised_first, "fused": with_fused, "16 at a time": in_pieces}
    table = Table("type", "outputs x inputs", "rows", *ways, "dequantising", "torch's product", "error", box=None)
    for size in sizes:
        weights = weights_of(stored, size)
        plain = dequantise(weights[0], torch.bfloat16)
        alone = microseconds(lambda weight: dequantise(weight, torch.bfloat16), weights)
        for count in counts:
            if time.monotonic() > until:
                console.print(f"out of time before {count} rows of {size}")
                break
            x = rows_of(count, size)
            expected = reference(x, weights[0])
            error = max(error_of(way(x, weights[0]), expected) for way in (dequantised_first, with_fused))
            cells = []
            for name, way in ways.items():
                if name == "16 at a time" and count > 256:
                    cells.append("")
                    continue
                cells.append(f"{microseconds(lambda weight, way=way, x=x: way(x, weight), weights):.1f}")
            product = microseconds(lambda _, x=x, plain=plain: x @ plain.t(), weights)
            size_text = "x".join(map(str, size))
            table.add_row(stored, size_text, str(count), *cells, f"{alone:.1f}", f"{product:.1f}", f"{error:.1e}")
    console.print(table)


# --- launches ---------------------------------------------------------------------------------------------------------


def sweep_launches(stored: str, size: Sequence[int], count: int, bandwidth: float, until: float) -> None:
    weights, x = weights_of(stored, size), rows_of(count, size)
    configs = [Config(*one) for one in itertools.product((16, 32, 64), (512, 1024, 2048), (4, 8, 16), (2, 3, 4))]
    configs = [*filter(sensible, configs)]
    if count == 1:
        ways = itertools.product((4, 8, 16, 32, 64), (256, 512, 1024), (2, 4, 8), (1, 2, 5, 12))
        some = [Config(outputs, inputs, warps, 1, unroll) for outputs, inputs, warps, unroll in ways]
        configs += [config for config in some if sensible_single(config)]
    with ThreadPoolExecutor(12) as pool:  # compiles several at a time
        works = pool.map(lambda config: right(x, weights[0], config), configs)
        configs = [config for config, one_works in zip(configs, works, strict=True) if one_works]
    times: dict[Config, float] = {}
    for config in configs:
        if time.monotonic() > until:
            console.print("out of time")
            break
        times[config] = microseconds(lambda weight, config=config: launched_as(config, x, weight), weights)
    table = Table(stored, "outputs", "inputs", "warps", "stages", "at once", f"{count} rows: us, share", box=None)
    for config in sorted(times, key=times.__getitem__)[:16]:
        share = weights[0].nbytes / times[config] / 1e6 / bandwidth
        told = (config.outputs, config.inputs, config.warps, config.stages, config.unroll)
        table.add_row("x".join(map(str, size)), *map(str, told), f"{times[config]:.1f}, {share:.2f}")
    console.print(table)


def sensible(config: Config) -> bool:
    """From one to eight groups of 64 inputs and 16 outputs in each warp, and none without inputs of its own."""
    groups = config.inputs // 64 * (config.outputs // 16)
    return config.inputs >= 64 * config.warps and config.warps <= groups <= 8 * config.warps


def sensible_single(config: Config) -> bool:
    """Whether threads have one to four rows, room for what is loaded, and more of them than half a row's words."""
    rows = config.outputs * config.inputs // 32 / (32 * config.warps)
    return 1 <= rows <= 4 and rows * config.unroll <= 24 and config.inputs // 16 < 32 * config.warps


def launched_as(config: Config, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """With tensor cores those that have stages."""
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    launch = packed_matmul.launch_narrow if config.stages > 1 else packed_matmul.launch_single
    launch(x, weight, out, config)
    return out


def right(x: torch.Tensor, weight: PackedWeight, config: Config) -> bool:
    with torch.inference_mode():
        try:
            return error_of(launched_as(config, x, weight), reference(x, weight)) < 2e-2
        except (OutOfResources, PTXASError):
            return False


if __name__ == "__main__":
    typer.run(main)
