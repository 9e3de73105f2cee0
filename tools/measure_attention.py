"""Measure block-sparse attention on a GPU, beside dense attention of our own and of torch.

    python tools/measure_attention.py
    python tools/measure_attention.py --sweep

Chunks at the end of contexts, whole prompts in chunks, and steps of decoding, with the heads of Qwen3.8-Flash-Next. All
ways run by turns in CUDA graphs, forwards and backwards, the sparse one twice for the noise. Their results are compared
first: if one is wrong, nothing is printed. Queries that select are either alike from token to token, or have nothing to
do with each other, which no text does: then tokens share fewest blocks. With --sweep, launches are compared instead.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

try:
    import torch
    import triton
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench_cudagraph
except ModuleNotFoundError as error:
    raise SystemExit(f"measure_attention: error: kernels are measured with torch and Triton: {error}") from None

from lazyio.engine.layers.attention import attend
from lazyio.engine.layers.block_selection import best, scores
from lazyio.kernels import sparse_attention as kernel
from lazyio.kernels.block_selection import Selected, select_blocks
from lazyio.kernels.block_selection import reference as selection_reference
from lazyio.kernels.measuring import the_gpu
from lazyio.kernels.sparse_attention import Config, attend_causal, attend_selected, group_of, reference

HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM, COUNT, RATIO = 24, 2, 256, 4, 128, 512, 4
SELECTION, SPARSE, BOTH, AGAIN = "selection", "sparse attention", "both", "both again"
DENSE, FLASH, CUDNN, MASKED = "dense, ours", "dense, SDPA flash", "dense, SDPA cuDNN", "selection and SDPA with a mask"
Ways = dict[str, Callable[[], object]]
console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The last tokens of a context, and what selects their keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def random(cls, tokens: int, context: int, alike: float, device: torch.device) -> Chunk:
        """`alike` of a selecting query is the same for 64 tokens in a row."""
        made = torch.Generator(device).manual_seed(context)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        shared = normal(-(-tokens // 64), INDEX_HEADS, INDEX_DIM).repeat_interleave(64, 0)[:tokens]
        queries = alike * shared + (1 - alike**2) ** 0.5 * normal(tokens, INDEX_HEADS, INDEX_DIM)
        keys = normal(context // RATIO, INDEX_DIM)
        parts = normal(tokens, HEADS, DIM), normal(context, KV_HEADS, DIM), normal(context, KV_HEADS, DIM)
        return cls(*(x.bfloat16() for x in (*parts, queries, keys)))

    @property
    def before(self) -> int:
        return len(self.k) - len(self.q)

    def cut(self, start: int, stop: int) -> Chunk:
        """Tokens [start, stop) of a whole prompt."""
        q, queries = self.q[start:stop], self.queries[start:stop]
        return Chunk(q, self.k[:stop], self.v[:stop], queries, self.keys[: stop // RATIO])

    def select(self) -> Selected | None:
        """None where all blocks are seen, as in the model."""
        if len(self.keys) <= COUNT:
            return None
        group = group_of(len(self.q), HEADS, KV_HEADS, self.q.dtype, self.q.device)
        return select_blocks(self.queries, self.keys, self.before, count=COUNT, ratio=RATIO, group=group)

    def sparse(self, selected: Selected | None) -> torch.Tensor:
        if selected is None:
            return self.dense()
        return attend_selected(self.q, self.k, self.v, selected, scale=DIM**-0.5)

    def dense(self) -> torch.Tensor:
        return attend_causal(self.q, self.k, self.v, scale=DIM**-0.5)

    def torch(self, backend: SDPBackend) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        with sdpa_kernel(backend):
            if self.before == 0 or len(self.q) == 1:  # one token sees all keys
                causal = len(self.q) > 1
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            else:
                bias = causal_lower_right(len(self.q), len(self.k))
                out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        return out[0].transpose(0, 1)

    def masked(self) -> torch.Tensor:
        """What the layers do without kernels."""
        length = torch.arange(self.before, len(self.k), device=self.q.device)[:, None] + 1
        hidden = torch.arange(len(self.keys), device=self.q.device) >= length // RATIO
        chosen = best(scores(self.queries, self.keys).masked_fill(hidden, -1), COUNT) | hidden
        allowed = torch.arange(len(self.k), device=self.q.device) < length
        allowed[:, : len(self.keys) * RATIO] &= chosen.repeat_interleave(RATIO, 1)
        return attend(self.q, self.k, self.v, scale=DIM**-0.5, allowed=allowed)


def main(
    contexts: Annotated[str, typer.Option(help="Tokens of contexts.")] = "2048,8192,16384,32768",
    steps: Annotated[str, typer.Option(help="Tokens of contexts of steps.")] = "8192,32768,131072",
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Rounds over all ways, there and back.")] = 2,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare launches instead.")] = False,
) -> None:
    device = the_gpu()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    lengths = [int(part) for part in contexts.split(",")]
    with torch.inference_mode():
        if sweep:
            sweep_launches([Chunk.random(min(chunk, length), length, 0.0, device) for length in lengths[1:]])
            return
        for alike in (0.0, 0.9):
            prompt = Chunk.random(max(lengths), max(lengths), alike, device)
            title = f"a prompt of {max(lengths):,} in chunks of {chunk:,}, {kind(alike)}"
            compare(title, ways_of_prompt(prompt, chunk), None, rounds)
        for length in map(int, steps.split(",")):
            given = Chunk.random(1, length, 0.0, device)
            compare(f"a step at {length:,}", ways_of(given), given, rounds)
        for length, alike in itertools.product(lengths, (0.0, 0.9)):
            if alike == 0 or length > RATIO * COUNT:
                given = Chunk.random(min(chunk, length), length, alike, device)
                title = f"{len(given.q):,} tokens at the end of {length:,}, {kind(alike)}"
                compare(title, ways_of(given), given, rounds)


def kind(alike: float) -> str:
    return "queries alike" if alike else "queries by chance"


def microseconds(run: Callable[[], object]) -> float:
    """The median of many runs in a CUDA graph."""
    return 1e3 * do_bench_cudagraph(run, rep=8, quantiles=[0.5])


def ways_of(given: Chunk) -> Ways:
    selected = given.select()

    def both() -> torch.Tensor:
        return given.sparse(given.select())

    selecting: Ways = {SELECTION: given.select, SPARSE: lambda: given.sparse(selected), BOTH: both}
    ways: Ways = {DENSE: given.dense, FLASH: lambda: given.torch(SDPBackend.FLASH_ATTENTION)}
    if selected is None:
        return ways
    return {**selecting, **ways, MASKED: given.masked, AGAIN: both}


def ways_of_prompt(prompt: Chunk, chunk: int) -> Ways:
    chunks = [prompt.cut(start, min(start + chunk, len(prompt.q))) for start in range(0, len(prompt.q), chunk)]
    selected = [one.select() for one in chunks]
    pairs = list(zip(chunks, selected, strict=True))

    def both() -> list[torch.Tensor]:
        return [one.sparse(one.select()) for one in chunks]

    return {
        SELECTION: lambda: [one.select() for one in chunks],
        SPARSE: lambda: [one.sparse(some) for one, some in pairs],
        BOTH: both,
        DENSE: lambda: [one.dense() for one in chunks],
        FLASH: lambda: [one.torch(SDPBackend.FLASH_ATTENTION) for one in chunks],
        f"{FLASH}, in one": lambda: prompt.torch(SDPBackend.FLASH_ATTENTION),
        f"{CUDNN}, in one": lambda: prompt.torch(SDPBackend.CUDNN_ATTENTION),
        AGAIN: both,
    }


def compare(title: str, ways: Ways, given: Chunk | None, rounds: int) -> None:
    errors = {} if given is None else errors_of(given, ways)
    if errors and max(errors.values()) > 1e-2:
        raise SystemExit(f"{title}: results are wrong, so no time counts: {errors}")
    times: dict[str, list[float]] = {}
    for turn in range(2 * rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            try:
                times.setdefault(name, []).append(microseconds(ways[name]))
            except RuntimeError as error:  # torch has no such backend here
                console.print(f"without {name!r}: {str(error).splitlines()[0]}")
                del ways[name]
    table = Table(title, "us, median [min, max]", "its time over dense SDPA flash", "error", box=None)
    for name, some in times.items():
        ratios = [one / other for one, other in zip(some, times[FLASH], strict=True)] if FLASH in times else [0.0]
        spread = f"{statistics.median(some):,.1f} [{min(some):,.1f}, {max(some):,.1f}]"
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        table.add_row(name, spread, ratio, f"{errors[name]:.1e}" if name in errors else "")
    console.print(table)


def errors_of(given: Chunk, ways: Ways) -> dict[str, float]:
    """Of the last tokens, beside the reference in float64; of the selection, the part of what it got wrong."""
    q, queries, blocks = given.q[-20:], given.queries[-20:], -(-len(given.k) // RATIO)
    sizes = {"count": COUNT, "ratio": RATIO, "group": 1}
    selected = selection_reference(queries, given.keys, len(given.k) - len(q), **sizes)
    dense, sparse = (reference(q, given.k, given.v, some, scale=DIM**-0.5).float() for some in (None, selected))
    errors = {}
    for name, way in ways.items():
        found = way()
        if isinstance(found, Selected):
            errors[name] = (found.mask(blocks)[-20:] != selected.mask(blocks)).float().mean().item()
        elif isinstance(found, torch.Tensor):
            exact = dense if name.startswith("dense") else sparse
            errors[name] = ((found[-20:].float() - exact).norm() / exact.norm()).item()
    return errors


# --- launches ---------------------------------------------------------------------------------------------------------


SWEPT = {
    "SELECTED": [
        *(Config(128, 64, 8, stages) for stages in (2, 3)),
        *(Config(128, 32, 8, stages) for stages in (2, 3)),
        *(Config(64, 64, 8, stages) for stages in (2, 3)),
        *(Config(64, 32, 4, stages) for stages in (2, 3)),
        Config(64, 64, 4, 2),
        Config(32, 64, 4, 2),
        Config(16, 64, 4, 2),
    ],
    "CAUSAL": [Config(128, 64, 8, 2), Config(128, 32, 8, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 2)],
}


def sweep_launches(chunks: list[Chunk]) -> None:
    for name, configs in SWEPT.items():
        times: dict[Config, list[float]] = {}
        for config in configs:
            with launched_as(name, config):
                try:
                    times[config] = [time_of(name, chunk) for chunk in chunks]
                except (OutOfResources, PTXASError) as error:
                    console.print(f"{name} {config}: {str(error).splitlines()[0]}")
        table = Table(name, "keys", "warps", "stages", *(f"us at {len(one.k):,}" for one in chunks), box=None)
        for config in sorted(times, key=lambda config: times[config][-1]):
            some = (f"{time:,.0f}" for time in times[config])
            table.add_row(*map(str, (config.rows, config.keys, config.warps, config.stages)), *some)
        console.print(table)


def time_of(name: str, chunk: Chunk) -> float:
    if name == "CAUSAL":
        return microseconds(chunk.dense)
    selected = chunk.select()
    return 0.0 if selected is None else microseconds(lambda: chunk.sparse(selected))


@contextmanager
def launched_as(name: str, config: Config) -> Iterator[None]:
    before = getattr(kernel, name)
    setattr(kernel, name, {**before, 2: [config]})
    try:
        yield
    finally:
        setattr(kernel, name, before)


if __name__ == "__main__":
    typer.run(main)
