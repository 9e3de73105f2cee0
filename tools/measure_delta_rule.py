"""Measure the gated delta rule on a GPU, beside a recurrence of one launch and beside flash-linear-attention.

    python tools/measure_delta_rule.py
    python tools/measure_delta_rule.py --sweep --tokens 8192

Prompts: all ways run by turns in CUDA graphs, forwards and backwards, ours twice for the noise. Their results must
agree, or nothing is printed. Steps: S is read and written once, which bounds them by bandwidth. With --sweep, launches
of each body are compared. flash-linear-attention takes part where it can be imported.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it.
# ruff: noqa: N803

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    raise SystemExit(f"measure_delta_rule: error: kernels are measured with torch and Triton: {error}") from None

from lazyio.kernels import gated_delta_rule as rule
from lazyio.kernels.gated_delta_rule import Arguments, Config
from lazyio.kernels.measuring import the_gpu

DIM = 128
OURS, AGAIN, RECURRENCE, FLASH = "ours", "ours again", "recurrence", "flash-linear-attention"
Way = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # outputs, and S
console = Console()


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of prompts.")] = "2048,4096,8192",
    sequences: Annotated[str, typer.Option(help="Sequences of steps.")] = "1,4,16,64",
    heads: Annotated[str, typer.Option(help="Heads of keys, and of values.")] = "16,48",
    rounds: Annotated[int, typer.Option(help="Rounds over all ways, there and back.")] = 5,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare launches of each body instead.")] = False,
) -> None:
    device = the_gpu()
    key_heads, value_heads = numbers(heads)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")

    def arguments(sizes: list[tuple[int, int]]) -> Arguments:
        return Arguments.random(device, 0, sizes, torch.bfloat16, (key_heads, value_heads), (DIM, DIM))

    with torch.inference_mode():
        if sweep:
            sweep_launches(arguments([(max(numbers(tokens)), 0)]), arguments([(1, 9)] * max(numbers(sequences))))
            return
        compare_prompts([arguments([(count, 0)]) for count in numbers(tokens)], rounds)
        measure_steps([arguments([(1, 9)] * count) for count in numbers(sequences)])


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def microseconds(run: Callable[[], object]) -> float:
    """The median of many runs in a CUDA graph."""
    return 1e3 * do_bench_cudagraph(run, rep=60, quantiles=[0.5])


# --- prompts ----------------------------------------------------------------------------------------------------------


def compare_prompts(prompts: list[Arguments], rounds: int) -> None:
    table = Table("tokens", "way", "us, median [min, max]", "its time over ours", "error beside ours", box=None)
    for given in prompts:
        ways = ways_of(given)
        errors = {name: error_beside(way(), ways[OURS]()) for name, way in ways.items()}
        if max(errors.values()) > 2e-2:
            raise SystemExit(f"the ways disagree, so no time counts: {errors}")
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(2 * rounds):
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                times[name].append(microseconds(ways[name]))
        for name, some in times.items():
            ratios = [one / ours for one, ours in zip(some, times[OURS], strict=True)]
            spread = f"{statistics.median(some):,.1f} [{min(some):,.1f}, {max(some):,.1f}]"
            ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            table.add_row(f"{len(given.q):,}", name, spread, ratio, f"{errors[name]:.1e}")
    console.print(table)


def error_beside(found: tuple[torch.Tensor, torch.Tensor], ours: tuple[torch.Tensor, torch.Tensor]) -> float:
    pairs = zip(found, ours, strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def ways_of(given: Arguments) -> dict[str, Way]:
    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        memory = given.memory[0].clone()
        sides = (given.beta, given.log_decay, given.chunks)
        return rule.gated_delta_rule(given.q, given.k, given.v, *sides, [memory]), memory

    ways: dict[str, Way] = {OURS: ours, RECURRENCE: lambda: one_launch(given)}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        console.print(f"without flash-linear-attention: {error}")
    else:
        # It wants tensors that are contiguous: copied once, outside of what is timed.
        q, k, v = (x.contiguous()[None] for x in (given.q, given.k, given.v))
        options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}

        def flash() -> tuple[torch.Tensor, torch.Tensor]:
            sides = {"g": given.log_decay[None], "beta": given.beta[None], "initial_state": given.memory[0][None]}
            outputs, memory = chunk_gated_delta_rule(q, k, v, **sides, **options)
            return outputs[0], memory[0]

        ways[FLASH] = flash
    return {**ways, AGAIN: ours}


@triton.jit
def recurrence(
    q,
    k,
    v,
    beta,
    log_decay,
    memory,
    out,
    tokens,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    PART: tl.constexpr,
):
    """Token by token, with S in registers: a program for some columns of S of one head."""
    head = tl.program_id(1)
    key, value = tl.arange(0, DIM), tl.program_id(0) * PART + tl.arange(0, PART)
    where = head * DIM * DIM + key[:, None] * DIM + value[None, :]
    state = tl.load(memory + where)
    q += head // EACH * DIM
    k += head // EACH * DIM
    v += head * DIM
    for token in range(tokens):
        of_q, of_k = tl.load(q + key).to(tl.float32), tl.load(k + key).to(tl.float32)
        of_q *= DIM**-0.5 * tl.rsqrt(tl.sum(of_q * of_q, 0) + 1e-6)
        of_k *= tl.rsqrt(tl.sum(of_k * of_k, 0) + 1e-6)
        state *= tl.exp(tl.load(log_decay + token * HEADS + head))
        known = tl.sum(state * of_k[:, None], 0)
        change = tl.load(beta + token * HEADS + head) * (tl.load(v + value).to(tl.float32) - known)
        state += of_k[:, None] * change[None, :]
        found = tl.sum(state * of_q[:, None], 0)
        tl.store(out + (token * HEADS + head) * DIM + value, found.to(out.dtype.element_ty))
        q += STRIDE
        k += STRIDE
        v += STRIDE
    tl.store(memory + where, state)


def one_launch(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = given.v.shape
    memory, out = given.memory[0].clone(), torch.empty_like(given.v, memory_format=torch.contiguous_format)
    part = 8
    recurrence[(dim // part, heads)](
        *(given.q, given.k, given.v, given.beta, given.log_decay, memory, out, tokens),
        HEADS=heads,
        EACH=heads // given.k.shape[1],
        DIM=dim,
        STRIDE=given.q.stride(0),
        PART=part,
        num_warps=1,
    )
    return out, memory


# --- steps ------------------------------------------------------------------------------------------------------------


def measure_steps(batches: list[Arguments]) -> None:
    table = Table("sequences", "us", "GB/s of S", box=None)
    for given in batches:
        time = microseconds(lambda given=given: launch(given))
        moved = 2 * sum(one.nbytes for one in given.memory)
        table.add_row(str(len(given.memory)), f"{time:.1f}", f"{moved / time / 1e3:,.0f}")
    console.print(table)


def launch(given: Arguments) -> torch.Tensor:
    """S is changed by every launch, which takes as long whatever it holds."""
    sides = (given.beta, given.log_decay, given.chunks, given.memory)
    return rule.gated_delta_rule(given.q, given.k, given.v, *sides)


# --- launches ---------------------------------------------------------------------------------------------------------


def sweep_launches(prompt: Arguments, steps: Arguments) -> None:
    """The whole rule, with one body launched in other ways and the other as it is."""
    rows = [Config(part, warps) for part, warps in itertools.product((32, 64, 128), (2, 4, 8))]
    columns = [Config(*one) for one in itertools.product((32, 64, 128), (4, 8), (1, 2, 3))]
    few = [Config(part, warps) for part, warps in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8))]
    for name, configs, given in (("PREPARE", rows, prompt), ("ADVANCE", columns, prompt), ("STEP", few, steps)):
        times = {}
        for config in configs:
            with launched_as(name, config):
                try:
                    times[config] = microseconds(lambda given=given: launch(given))
                except (OutOfResources, PTXASError) as error:
                    console.print(f"{name} {config}: {error}")
        table = Table(name, "warps", "stages", "us", box=None)
        for config in sorted(times, key=times.__getitem__):
            table.add_row(str(config.part), str(config.warps), str(config.stages), f"{times[config]:.1f}")
        console.print(table)


@contextmanager
def launched_as(name: str, config: Config) -> Iterator[None]:
    before = getattr(rule, name)
    setattr(rule, name, config if name == "STEP" else {**before, torch.bfloat16: [config]})
    try:
        yield
    finally:
        setattr(rule, name, before)


if __name__ == "__main__":
    typer.run(main)
