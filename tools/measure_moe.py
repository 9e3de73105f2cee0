"""Measure mixtures of experts on a GPU, beside the least time that their bytes and their arithmetic allow.

    python tools/measure_moe.py
    python tools/measure_moe.py --tokens 1,64 --weights bf16,Q4_0,Q4_K/Q5_0
    python tools/measure_moe.py --sweep --tokens 1,64,2048

The floor is what is larger: bytes of the experts that a token chose over the bandwidth, or arithmetic over the peak.
Beside ours run torch's products of groups, for bf16. Choices rotate, so that no cache answers; times are of CUDA
graphs. Results must agree with the reference, or nothing is printed. With --sweep, launches of the bodies are compared.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

try:
    import torch
    import triton
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench_cudagraph
except ModuleNotFoundError as error:
    raise SystemExit(f"measure_moe: error: kernels are measured with torch and Triton: {error}") from None

from lazyio.engine.layers import moe as layers
from lazyio.kernels import moe, packed, route
from lazyio.kernels.contract import error_of
from lazyio.kernels.measuring import the_gpu
from lazyio.kernels.moe import Config, Launch, Ways, Weight

BANDWIDTH, ARITHMETIC = 4.3e12, 790e12  # bytes and float operations of an H200 in a second
CACHED_BYTES = 240e6  # four times its cache
WITHIN = 1e-2
console = Console()


@dataclass(frozen=True, slots=True)
class Sizes:
    experts: int
    hidden: int
    width: int
    slots: int


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens and what they choose, several times over, and the experts."""

    x: torch.Tensor
    choices: list[tuple[torch.Tensor, torch.Tensor]]  # chosen and weights
    gate_up: Weight
    down: Weight

    def floor_us(self, sizes: Sizes) -> float:
        chosen = self.choices[0][0]
        moved = bytes_of(self.gate_up, self.down) / sizes.experts * len(torch.unique(chosen))
        operations = 2 * chosen.numel() * 3 * sizes.width * sizes.hidden
        return 1e6 * max(moved / BANDWIDTH, operations / ARITHMETIC)

    def run(self, launch: Launch | None = None) -> list[torch.Tensor]:
        return [moe.moe(self.x, *choice, self.gate_up, self.down, launch) for choice in self.choices]


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of ubatches.")] = "1,4,16,64,256,2048,8192",
    weights: Annotated[str, typer.Option(help="Types of experts, of the last projection after a / if another.")] = (
        "bf16,Q4_0"
    ),
    sizes: Annotated[str, typer.Option(help="Experts, hidden, width, experts that a token chooses.")] = (
        "512,2560,640,10"
    ),
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare launches of the bodies instead.")] = False,
) -> None:
    the_gpu()
    of = Sizes(*numbers(sizes))
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    with torch.inference_mode():
        for stored in weights.split(","):
            experts = experts_of(stored, of)
            works = [work_of(count, experts, of) for count in numbers(tokens)]
            if sweep:
                for work in works:
                    sweep_launches(stored, work, of)
            else:
                compare(stored, works, of)
        if not sweep:
            compare_choosing(numbers(tokens), of)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def experts_of(stored: str, sizes: Sizes) -> tuple[Weight, Weight]:
    device = torch.device("cuda", torch.cuda.current_device())
    made = torch.Generator(device).manual_seed(0)
    shapes = (sizes.experts, 2 * sizes.width, sizes.hidden), (sizes.experts, sizes.hidden, sizes.width)
    types = stored.split("/") if "/" in stored else [stored, stored]

    def weight(kind: str, shape: tuple[int, int, int]) -> Weight:
        std = shape[-1] ** -0.5
        if kind == "bf16":
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=made)
        return packed.random(kind, shape, device, made, std)

    first, second = (weight(kind, shape) for kind, shape in zip(types, shapes, strict=True))
    return first, second


def bytes_of(*weights: Weight) -> int:
    return sum(weight.nbytes for weight in weights)


def work_of(tokens: int, experts: tuple[Weight, Weight], sizes: Sizes) -> Work:
    """Every token chooses at random. So many choices that experts of the first are out of the cache after the last."""
    device = experts[0].device
    made = torch.Generator(device).manual_seed(tokens)
    touched = bytes_of(*experts) * min(1.0, tokens * sizes.slots / sizes.experts)
    choices = []
    for _ in range(math.ceil(CACHED_BYTES / touched)):
        chosen = torch.rand(tokens, sizes.experts, generator=made, device=device).topk(sizes.slots).indices
        of_each = torch.rand(tokens, sizes.slots, generator=made, device=device) + 0.1
        choices.append((chosen, of_each / of_each.sum(1, keepdim=True)))
    x = torch.randn(tokens, sizes.hidden, generator=made, device=device, dtype=torch.bfloat16)
    return Work(x, choices, *experts)


def microseconds(run: Callable[[], Sequence[object]]) -> float:
    """Of one of the runs that a call makes: the median of many in a CUDA graph."""
    return 1e3 * do_bench_cudagraph(run, rep=40, quantiles=[0.5]) / len(run())


def compare(stored: str, works: list[Work], sizes: Sizes) -> None:
    table = Table("weights", "tokens", "way", "us", "floor, us", "times the floor", "error", box=None)
    for work in works:
        ways = {"ours": work.run}
        if isinstance(work.gate_up, torch.Tensor) and isinstance(work.down, torch.Tensor):
            ways["torch"] = of_torch(work)
        first = replace(work, choices=work.choices[:1])
        expected = [moe.reference(work.x, *first.choices[0], work.gate_up, work.down)]
        floor = work.floor_us(sizes)
        for name, run in ways.items():
            error = error_of(run()[:1], expected, WITHIN)
            if error > WITHIN:
                raise SystemExit(f"{name} is wrong for {len(work.x)} tokens, so no time counts: {error:.2g}")
            time = microseconds(run)
            figures = (f"{time:,.1f}", f"{floor:,.1f}", f"{time / floor:.2f}", f"{error:.1e}")
            table.add_row(stored, f"{len(work.x):,}", name, *figures)
    console.print(table)


def of_torch(work: Work) -> Callable[[], list[torch.Tensor]]:
    """The layer as it is without kernels."""
    layer = layers.Experts(1, 1, 1)
    del layer.gate_up_proj, layer.down_proj
    layer.gate_up_proj, layer.down_proj = work.gate_up, work.down

    def run() -> list[torch.Tensor]:
        before, layers.usable = layers.usable, lambda device: False
        try:
            return [layer(work.x, *choice) for choice in work.choices]
        finally:
            layers.usable = before

    return run


def of_ours(logits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    return route.route(logits, slots, normalise=True)


def of_topk(logits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(slots)
    return weights / weights.sum(-1, keepdim=True), chosen


def compare_choosing(counts: list[int], sizes: Sizes) -> None:
    """How experts are chosen, which no figure above has in it."""
    table = Table("tokens", "choosing experts, us", "torch, us", box=None)
    for tokens in counts:
        logits = torch.randn(tokens, sizes.experts, device="cuda", dtype=torch.bfloat16)
        runs_of = [functools.partial(way, logits, sizes.slots) for way in (of_ours, of_topk)]
        times = [microseconds(lambda run=run: [run()]) for run in runs_of]
        table.add_row(f"{tokens:,}", *(f"{time:.1f}" for time in times))
    console.print(table)


# --- launches ---------------------------------------------------------------------------------------------------------


def sweep_launches(stored: str, work: Work, sizes: Sizes) -> None:
    """The ways to launch each product, with the other as it is; and both as they are, by pair and by tiles."""
    floor = work.floor_us(sizes)
    is_packed = isinstance(work.gate_up, packed.PackedWeight)
    now = moe.launch_of(len(work.x), sizes.slots, sizes.experts, not is_packed, is_packed)
    candidates = {f"as {one.rows} rows": one for one in (moe.BY_PAIR, moe.BY_FEW, *moe.BY_TILE) if worth_it(one, work)}
    for body in ("gate_up", "down"):
        for launch in (now,) if now.rows == 1 or len(work.x) > 16 else (moe.BY_PAIR, now):
            for config in configs(launch, body, isinstance(getattr(work, body), packed.PackedWeight)):
                name = f"{launch.rows} rows, {body} {', '.join(f'{k} {v}' for k, v in settings(config).items())}"
                candidates[name] = replace(launch, **{body: Ways(config, config)})
    times = {}
    first = replace(work, choices=work.choices[:1])
    with ThreadPoolExecutor(12) as pool:  # compiles several at a time
        ready = dict(zip(candidates, pool.map(lambda launch: runs(first, launch), candidates.values()), strict=True))
    for name, launch in candidates.items():
        if ready[name]:
            times[name] = microseconds(lambda launch=launch: work.run(launch))
    table = Table(f"{stored}, {len(work.x):,} tokens", "us", "times the floor", box=None)
    best = sorted(times, key=times.__getitem__)
    for name in [*(name for name in best if name.startswith("as ")), *short(best)]:
        table.add_row(name, f"{times[name]:,.1f}", f"{times[name] / floor:.2f}")
    console.print(table)
    failed = [name for name in candidates if not ready[name]]
    console.print(f"{len(failed)} can't be launched: {'; '.join(failed)}" if failed else "", end="\n")


def short(names: list[str], of_each: int = 7) -> Iterator[str]:
    """The first of each body."""
    for body in ("gate_up", "down"):
        yield from [name for name in names if f", {body} " in name][:of_each]


def worth_it(launch: Launch, work: Work) -> bool:
    if launch.rows == moe.BY_FEW.rows and not isinstance(work.gate_up, packed.PackedWeight):
        return False
    return launch.rows > 4 or len(work.x) <= (64 if launch.rows == 1 else 256)


def settings(config: Config) -> dict[str, int]:
    return {name: getattr(config, name) for name in config.__slots__}


def configs(launch: Launch, body: str, is_packed: bool) -> list[Config]:
    if is_packed and launch.rows <= 16:
        return of_codes(launch, body)
    if launch.rows > 1:
        stages = (2, 3, 4)
        small = [Config(part, step, 4, count) for part, step, count in itertools.product((64, 128), (64, 128), stages)]
        large = [Config(128, step, 8, count) for step, count in itertools.product((64, 128), (2, 3))]
        return [*small, *large] if launch.rows < 128 else [*small[:3], *small[6:9], *large, Config(256, 64, 8, 3)]
    if body == "gate_up":
        ways = itertools.product((4, 8, 16), (256, 512), (4, 8), ((1, 1), (1, 2), (3, 1)))
    else:
        ways = itertools.product((4, 8, 16), (128,), (4, 8), ((1, 1), (1, 5), (3, 1)))
    together = 1 if body == "gate_up" else 2
    return [Config(part, step, warps, stages, unroll, together) for part, step, warps, (stages, unroll) in ways]


def of_codes(launch: Launch, body: str) -> list[Config]:
    if launch.rows == moe.BY_FEW.rows:
        parts = (8, 16, 32) if body == "gate_up" else (32, 64, 128)
        ways = itertools.product(parts, (256, 512) if body == "gate_up" else (128, 256), (2, 4), (1, 2))
        some = [Config(part, step, warps, 1, unroll) for part, step, warps, unroll in ways]
        return [config for config in some if sensible(config, 2 if body == "gate_up" else 1)]
    if launch.rows > 1:
        ways = itertools.product((16, 32, 64), (128, 256, 512), (4, 8), (3, 4))
        return [Config(*way) for way in ways]
    # Steps that are made at once, for each size of a step.
    if body == "gate_up":
        parts, unrolls = (2, 4, 8, 16), {256: (5, 10), 512: (3, 5), 1024: (2, 3)}
    else:
        parts, unrolls = (4, 8, 16, 32), {256: (13, 25), 512: (5, 7, 13), 1024: (4, 7)}
    sizes = [(step, unroll) for step, of_step in unrolls.items() for unroll in of_step]
    ways = itertools.product(parts, sizes, (1, 2, 4, 8))
    some = [Config(part, step, warps, 1, unroll) for part, (step, unroll), warps in ways]
    return [config for config in some if sensible(config, 2 if body == "gate_up" else 1)]


def sensible(config: Config, rows_of_part: int) -> bool:
    """Whether threads have one to four rows, room for what is loaded, and more of them than half a row's words."""
    rows = config.part * rows_of_part * config.step // 32 / (32 * config.warps)
    return 1 <= rows <= 4 and rows * config.unroll <= 28 and config.step // 16 < 32 * config.warps


def runs(work: Work, launch: Launch) -> bool:
    """Whether there is room for it; compiles it."""
    try:
        work.run(launch)
    except (OutOfResources, PTXASError):
        return False
    return True


if __name__ == "__main__":
    typer.run(main)
