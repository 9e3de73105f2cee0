"""Measure parts of Qwen3.8-Flash-Next on a GPU, beside torch's code for them.

    python tools/measure_blocks.py
    python tools/measure_blocks.py --sweep

The parts are hyper-connections, gated delta nets and the block with the table. All ways run by turns in CUDA graphs,
forwards and backwards, the one in use twice for the noise. Their results must agree, or nothing is printed. The floor
is the time of the bytes that any way must move: inputs, results and weights, at the speed of a copy measured here. With
--sweep, launches of each body are compared instead.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

try:
    import torch
    import triton
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench_cudagraph
except ModuleNotFoundError as error:
    raise SystemExit(f"measure_blocks: error: kernels are measured with torch and Triton: {error}") from None

from lazyio.engine.layers import hyper_connection as layers
from lazyio.engine.layers import ngram_embedding
from lazyio.engine.layers.gated_delta_net import GatedDeltaNet
from lazyio.engine.layers.hyper_connection import HyperConnection, Streams
from lazyio.engine.layers.ngram_embedding import NgramEmbedding
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch
from lazyio.engine.weights.dummy import draw
from lazyio.kernels import delta_net, hyper_connection, ple_block
from lazyio.kernels.expand_rows import expand_rows
from lazyio.kernels.hyper_connection import Given
from lazyio.kernels.measuring import the_gpu
from lazyio.ple.dtypes import TYPES

HIDDEN, COUNT, RANK, VALUES, HEADS, TAPS, DILATION, EPS = 2560, 4, 320, 2560, 16, 4, 3, 1e-6
WIDTH = COUNT * HIDDEN
NET = (16, 48, 128, 128, 4)  # heads of keys, and of values; their dimensions; taps
KERNELS, AGAIN, TORCH, STORED = "kernels", "kernels again", "torch", "kernels, the gate stored"
Way = Callable[[], Sequence[torch.Tensor]]
console = Console(width=120)


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of ubatches.")] = "1,4,16,128,512,2048",
    rounds: Annotated[int, typer.Option(help="Rounds over all ways, there and back.")] = 2,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare launches of each body instead.")] = False,
) -> None:
    device = the_gpu()
    counts = [int(part) for part in tokens.split(",")]
    with torch.inference_mode():
        speed = copy_speed(device)
        console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
        console.print(f"a copy moves {speed / 1e3:,.0f} GB/s")
        if sweep:
            for count in (min(counts), max(counts)):
                sweep_launches(
                    connection(count, device), table_block(count, device), net(count, device)[KERNELS], count
                )
            return
        parts = {
            "a hyper-connection": (connection, connection_bytes),
            "a gated delta net": (net, net_bytes),
            "the block with the table": (table_block, block_bytes),
        }
        for what, (make, size) in parts.items():
            compare(what, {n: (make(n, device), size(n)) for n in counts}, rounds, speed)


def microseconds(run: Callable[[], object]) -> float:
    """The median of many runs in a CUDA graph."""
    return 1e3 * do_bench_cudagraph(run, rep=20, quantiles=[0.5])


def copy_speed(device: torch.device) -> float:
    """Bytes a microsecond, read and written by a kernel that does no more."""
    source = torch.zeros(1 << 28, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: torch.neg(source, out=target))


def randomised(layer: torch.nn.Module, device: torch.device) -> Any:
    layer = layer.to(device, torch.bfloat16).requires_grad_(False)
    made = torch.Generator(device).manual_seed(0)
    for name, parameter in layer.named_parameters():
        module, _, last = name.rpartition(".")
        draw(layer.get_submodule(module), last, parameter, made)
    return layer


# --- the ways ---------------------------------------------------------------------------------------------------------


def connection(tokens: int, device: torch.device) -> dict[str, Way]:
    """From what a block gave to the input of the next, and the streams between them."""
    layer = randomised(HyperConnection(HIDDEN, COUNT, RANK, EPS), device)
    made = torch.Generator(device).manual_seed(1)
    before = torch.randn(tokens, WIDTH, generator=made, device=device).bfloat16()
    output = torch.randn(tokens, HIDDEN, generator=made, device=device).bfloat16()
    logits = torch.randn(tokens, COUNT, COUNT, generator=made, device=device)
    as_torch = logits.sum(1, keepdim=True).bfloat16()

    def run(logits: torch.Tensor = logits) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        after = layer(Streams(before, COUNT, Given(output, logits)), lambda x: seen.append(x) or x)
        assert after.given is not None
        return [after.before, *seen]

    def plain() -> list[torch.Tensor]:
        with changed(Streams, "fused", False):
            return run(as_torch)

    def stored() -> list[torch.Tensor]:
        """As for a W_up that is packed."""
        weight = layer.block_inject_weight.weight
        with changed(layers, "_plain", lambda linear, _: weight if linear is layer.block_inject_weight else None):
            return run()

    return {KERNELS: run, TORCH: plain, STORED: stored, AGAIN: run}


def connection_bytes(tokens: int) -> int:
    return 2 * (2 * tokens * (WIDTH + HIDDEN) + WIDTH * (1 + COUNT + 2 * RANK))


def net(tokens: int, device: torch.device) -> dict[str, Way]:
    """All of a gated delta net. Torch's way has the kernel of the delta rule too."""
    layer = randomised(GatedDeltaNet(HIDDEN, *NET, EPS, "sigmoid"), device)
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    made = torch.Generator(device).manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=made, device=device).bfloat16()
    piece = layer.new_piece(tokens, torch.bfloat16, device)
    ubatch = Ubatch.of([(State({layer: piece}, tokens), [0] * tokens)], device)

    def run() -> list[torch.Tensor]:
        piece.inputs.entries.zero_()
        piece.memory.value.zero_()
        return [layer(x, ubatch)]

    def plain() -> list[torch.Tensor]:
        with changed(GatedDeltaNet, "_fused", lambda *_: False):
            return run()

    return {KERNELS: run, TORCH: plain, AGAIN: run}


def net_bytes(tokens: int) -> int:
    key_heads, heads, key, value, taps = NET
    channels, inner = 2 * key_heads * key + heads * value, heads * value
    weights = HIDDEN * (channels + 2 * inner + 2 * heads) + channels * taps
    return 2 * (2 * tokens * HIDDEN + weights) + 2 * 4 * heads * key * value


class Ready:
    """Rows that are there."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def values(self) -> torch.Tensor:
        return self._rows


def table_block(tokens: int, device: torch.device) -> dict[str, Way]:
    """What expanded rows add to the streams, the two products with them included."""
    layer = randomised(NgramEmbedding(HIDDEN, COUNT, VALUES, TAPS, DILATION, EPS), device)
    made = torch.Generator(device).manual_seed(1)
    streams = torch.randn(tokens, WIDTH, generator=made, device=device).bfloat16()
    rows = Ready(torch.randn(tokens, VALUES, generator=made, device=device).bfloat16())
    state = State({layer.conv1d: layer.conv1d.new_piece(tokens, torch.bfloat16, device)}, tokens)
    ubatch = Ubatch.of([(state, [0] * tokens)], device)

    def run() -> list[torch.Tensor]:
        state.pieces[layer.conv1d].entries.zero_()
        return [layer(streams, ubatch, rows)]

    def plain() -> list[torch.Tensor]:
        with changed(ngram_embedding, "usable", lambda _: False):
            return run()

    def products() -> list[torch.Tensor]:
        return [layer.key_proj(rows.values()), layer.value_proj(rows.values())]

    return {KERNELS: run, TORCH: plain, "the two products alone": products, **expansions(tokens, device), AGAIN: run}


def expansions(tokens: int, device: torch.device) -> dict[str, Way]:
    """The rows expanded: what products that expand them on the way could save at most."""
    each, heads = VALUES // HEADS, torch.arange(tokens * HEADS, device=device)
    ways: dict[str, Way] = {}
    for stored in ("F8_E4M3", "Q4_0"):
        packed = torch.randint(0, 120, (len(heads), TYPES[stored].row_bytes(each)), dtype=torch.uint8, device=device)
        out = torch.empty(len(heads), each, dtype=torch.bfloat16, device=device)

        def run(packed: torch.Tensor = packed, stored: str = stored, out: torch.Tensor = out) -> list[torch.Tensor]:
            expand_rows(packed, heads, stored, out)
            return [out, packed]

        ways[f"expansion of {stored} alone"] = run
    return ways


def block_bytes(tokens: int) -> int:
    return 2 * (tokens * (2 * WIDTH + VALUES) + VALUES * (WIDTH + HIDDEN) + WIDTH * (3 + TAPS))


@contextmanager
def changed(where: Any, name: str, value: object) -> Iterator[None]:
    before = where.__dict__[name]
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


# --- in turns ---------------------------------------------------------------------------------------------------------


def compare(what: str, cases: dict[int, tuple[dict[str, Way], int]], rounds: int, speed: float) -> None:
    table = Table("tokens", what, "us, median [min, max]", "its time over that of kernels", "of the floor", box=None)
    for tokens, (ways, size) in cases.items():
        if tokens == 1:
            check(ways)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(2 * rounds):
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                times[name].append(microseconds(ways[name]))
        for name, some in times.items():
            ratios = [one / ours for one, ours in zip(some, times[KERNELS], strict=True)]
            middle = statistics.median(some)
            spread = f"{middle:,.1f} [{min(some):,.1f}, {max(some):,.1f}]"
            ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            table.add_row(f"{tokens:,}", name, spread, ratio, f"{middle * speed / size:.1f}")
    console.print(table)


def check(ways: dict[str, Way]) -> None:
    """Exit unless all ways give the same but for rounding; those that give something else are not ways but parts."""
    expected = ways[TORCH]()
    for name, way in ways.items():
        found = way()
        if len(found) != len(expected):
            continue
        error = max(
            ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, expected, strict=True)
        )
        if not error < 2e-2:
            raise SystemExit(f"{name} differs from torch by {error:.2g} of its size, so no time counts")


# --- launches ---------------------------------------------------------------------------------------------------------


def sweep_launches(connection: dict[str, Way], block: dict[str, Way], of_net: Way, tokens: int) -> None:
    """The whole of each, with one body launched in other ways and the others as they are."""
    mixes = hyper_connection.MIX
    chosen = next(config for config in mixes if tokens <= config.tokens)
    place = mixes.index(chosen)
    sizes = ((16,), (16, 32)) if tokens <= 16 else ((64, 128), (32, 64))
    of_mix = [
        (*mixes[:place], replace(chosen, rows=r, width=w, warps=n, stages=s), *mixes[place + 1 :])
        for r, w, n, s in itertools.product(*sizes, (4, 8), (2, 3, 4))
    ]
    bodies: list[tuple[Any, str, Sequence[object], Way]] = [
        (hyper_connection, "CONNECT", list(itertools.product((1, 2, 4), (2, 4, 8))), connection[KERNELS]),
        (hyper_connection, "MIX", of_mix, connection[KERNELS]),
        (hyper_connection, "BLEND", list(itertools.product((512, 1024, 4096), (2, 4, 8))), connection[STORED]),
        (delta_net, "CONVOLVE", list(itertools.product((8, 16, 32), (128, 256, 512), (4, 8))), of_net),
        (delta_net, "NORM", list(itertools.product((8, 16, 32, 64), (2, 4, 8))), of_net),
        (ple_block, "CONVOLVE", list(itertools.product((16, 32), (128, 256, 512), (4, 8))), block[KERNELS]),
    ]
    for module, name, configs, way in bodies:
        times: dict[int, float] = {}
        for i, config in enumerate(configs):
            with changed(module, name, config):
                try:
                    times[i] = microseconds(way)
                except (OutOfResources, PTXASError) as error:
                    console.print(f"{name} {config}: {error}")
        table = Table(name, f"us, {tokens:,} tokens", box=None)
        for i in sorted(times, key=times.__getitem__)[:8]:
            config = configs[i] if name != "MIX" else configs[i][place]  # type: ignore[index]
            table.add_row(str(config), f"{times[i]:.1f}")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
