"""The gated delta rule on a GPU: chunks of prompts and single tokens of several sequences.

`gated_delta_rule` launches the bodies, which are in delta_rule_bodies.py. Tokens are taken in the blocks of 64 of
engine/layers/delta_rule.py: cuts at multiples of 64 change no bit, and a last token that is alone in its block is a
step, as it is when it's decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lazyio.errors import Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies, shared_bytes
from lazyio.kernels.places import on_device, places

#: Tokens of a block.
BLOCK = 64

_DIMS = (16, 32, 64, 128)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Chunk(NamedTuple):
    """Tokens [start, start + length) of q, k and v: they follow on the `before` tokens of their sequence."""

    start: int
    length: int
    before: int


def supports(key_dim: int, value_dim: int) -> bool:
    """Whether heads of these dimensions have a kernel."""
    return key_dim in _DIMS and value_dim in _DIMS


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    chunks: Sequence[Chunk],
    memory: Sequence[torch.Tensor],
) -> torch.Tensor:
    """o [tokens, value_heads, value_dim] in v's dtype, on the current stream; never waits.

    q and k [tokens, key_heads, key_dim], v [tokens, value_heads, value_dim]: float32, bfloat16 or float16; tokens may
    lie apart. q and k are brought to unit length here, q divided by sqrt(key_dim) then; value head j has those of key
    head j * key_heads / value_heads. beta and log_decay float32 [tokens, value_heads], contiguous; no log decay is
    above 0. Spans are of different sequences and have all tokens; `memory` has S of each, float32
    [value_heads, key_dim, value_dim], contiguous, and changed in place.
    Matrices of bfloat16 are multiplied as such. float16 has no room for all factors: it is multiplied as float32.
    Raises Unsupported where Triton is missing, and for dimensions that have no kernel.
    """
    _check(q, k, v, beta, log_decay, chunks, memory)
    out = v.new_empty(v.shape)
    work = _work(tuple([_cut(chunk) for chunk in chunks]), q.device)
    shape = {
        **{"HEADS": v.shape[1], "EACH": v.shape[1] // k.shape[1], "KEY": k.shape[2], "VALUE": v.shape[2]},
        **{"Q_STRIDE": q.stride(0), "K_STRIDE": k.stride(0), "V_STRIDE": v.stride(0)},
    }
    if work.following:
        _follow((q, k, v), (beta, log_decay), work, [memory[i] for i in work.following], out, shape)
    if work.stepping:
        _step((q, k, v), (beta, log_decay), work, [memory[i] for i in work.stepping], out, shape)
    return out


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    chunks: Sequence[Chunk],
    memory: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What `gated_delta_rule` does, token by token in float64 and on any device; `memory` may be float64 too."""
    each = v.shape[1] // k.shape[1]
    q, k = (unit(x.double()).repeat_interleave(each, 1) for x in (q, k))
    q, v, beta, decay = q * k.shape[2] ** -0.5, v.double(), beta.double(), log_decay.double().exp()
    out = torch.empty_like(v)
    for chunk, kept in zip(chunks, memory, strict=True):
        state = kept.double()
        for t in range(chunk.start, chunk.start + chunk.length):
            state = state * decay[t, :, None, None]
            change = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * change[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
        kept.copy_(state)
    return out


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x**2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, slots=True)
class Config:
    """How a body is launched."""

    part: int  # columns that a program handles at once: of S, and of q and k in `prepare`
    warps: int
    stages: int = 1
    shared_bytes: int = 0  # that a program may have on this GPU, at least


#: By the dtype that matrices are multiplied in; the first whose memory is there. Chosen for heads of 128 on an H200.
PREPARE = {torch.bfloat16: [Config(64, 4)], torch.float32: [Config(32, 8)]}
ADVANCE = {
    torch.bfloat16: [Config(64, 4, 3, 176_000), Config(32, 4, 2, 99_000), Config(32, 4)],
    torch.float32: [Config(16, 8)],
}
STEP = Config(32, 4)


@dataclass(frozen=True, slots=True)
class _Work:
    """Which chunks go from block to block, which end with a step, and the bodies' tables of both."""

    following: tuple[int, ...]
    blocks: torch.Tensor
    sequences: torch.Tensor
    stepping: tuple[int, ...]
    tokens: torch.Tensor


def _cut(chunk: Chunk) -> Chunk:
    """All that tables depend on, so that they are the same for all steps of a batch."""
    start, length, before = chunk
    return Chunk(start, length, before % BLOCK if length > 1 else 0)


# Tables on a GPU are the same for all layers, and for all steps of a batch.
@functools.lru_cache(maxsize=256)
def _work(chunks: tuple[Chunk, ...], device: torch.device) -> _Work:
    blocks: list[list[int]] = []
    sequences: list[list[int]] = []
    following, stepping, tokens = [], [], []
    for i, chunk in enumerate(chunks):
        stop = chunk.start + chunk.length
        if chunk.length == 1 or (chunk.before + chunk.length) % BLOCK == 1:
            stop -= 1
            stepping.append(i)
            tokens.append(stop)
        if stop > chunk.start:
            first = chunk.start - chunk.before % BLOCK
            following.append(i)
            sequences.append([first, chunk.start, stop, len(blocks)])
            blocks += [[at, chunk.start, stop] for at in range(first, stop, BLOCK)]
    blocks_on, sequences_on, tokens_on = (
        on_device(table, torch.int32, device) for table in (blocks, sequences, tokens)
    )
    return _Work(tuple(following), blocks_on, sequences_on, tuple(stepping), tokens_on)


def _follow(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sides: tuple[torch.Tensor, torch.Tensor],
    work: _Work,
    memory: Sequence[torch.Tensor],
    out: torch.Tensor,
    shape: dict[str, int],
) -> None:
    language = _bodies().tl
    dtype = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32
    operand = language.bfloat16 if dtype == torch.bfloat16 else language.float32
    matrices = (len(work.blocks), shape["HEADS"], BLOCK, BLOCK)
    solved, scores = (torch.empty(matrices, dtype=dtype, device=out.device) for _ in range(2))
    factors = torch.empty(*matrices[:2], 4, BLOCK, device=out.device)
    of_keys = {name: size for name, size in shape.items() if not name.startswith("V")}
    config = _fitting(PREPARE[dtype], out.device)
    _bodies().prepare[(len(work.blocks) * shape["HEADS"],)](
        *(*qkv[:2], *sides, work.blocks, solved, scores, factors),
        **of_keys,
        WIDTH=min(config.part, shape["KEY"]),
        OPERAND=operand,
        num_warps=config.warps,
    )
    config = _fitting(ADVANCE[dtype], out.device)
    part = min(config.part, shape["VALUE"])
    _bodies().advance[(shape["VALUE"] // part, shape["HEADS"], len(work.following))](
        *(*qkv, solved, scores, factors, work.sequences, memory[0], places(memory), out),
        **shape,
        PART=part,
        OPERAND=operand,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _step(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sides: tuple[torch.Tensor, torch.Tensor],
    work: _Work,
    memory: Sequence[torch.Tensor],
    out: torch.Tensor,
    shape: dict[str, int],
) -> None:
    part = min(STEP.part, shape["VALUE"])
    _bodies().step[(shape["VALUE"] // part, shape["HEADS"], len(work.stepping))](
        *(*qkv, *sides, work.tokens, memory[0], places(memory), out),
        **shape,
        PART=part,
        num_warps=STEP.warps,
    )


def _fitting(configs: Sequence[Config], device: torch.device) -> Config:
    if device.type != "cuda":
        return configs[-1]
    return next(config for config in configs if config.shared_bytes <= shared_bytes(device))


def _bodies() -> Any:
    return bodies("delta_rule_bodies", "the kernel of the gated delta rule")


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    chunks: Sequence[Chunk],
    memory: Sequence[torch.Tensor],
) -> None:
    if not supports(k.shape[2], v.shape[2]) or v.dtype not in _DTYPES:
        raise Unsupported(
            f"the gated delta rule has no kernel for {v.dtype} and heads of {k.shape[2]} and {v.shape[2]}: it has those"
            f" for float32, bfloat16 and float16, and dimensions of {_DIMS}"
        )
    tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    assert q.shape == k.shape == (tokens, key_heads, key_dim), "q and k are [tokens, key_heads, key_dim]"
    assert heads % key_heads == 0, "key heads don't divide the value heads"
    assert q.dtype == k.dtype == v.dtype, "q, k and v are of one dtype"
    assert q.stride()[1:] == k.stride()[1:] == (key_dim, 1), "q or k of a token is not contiguous"
    assert v.stride()[1:] == (value_dim, 1), "v of a token is not contiguous"
    assert beta.shape == log_decay.shape == (tokens, heads), "beta and log decay are [tokens, value_heads]"
    assert beta.dtype == log_decay.dtype == torch.float32, "beta and log decay are float32"
    assert beta.is_contiguous(), "beta is not contiguous"
    assert log_decay.is_contiguous(), "the log decay is not contiguous"
    assert v.device == q.device == k.device == beta.device == log_decay.device, "tensors are on different devices"
    assert len(chunks) == len(memory) > 0, "every chunk has its S"
    assert sum([chunk.length for chunk in chunks]) == tokens, "chunks have all tokens"
    shape = (heads, key_dim, value_dim)
    for one in memory:
        assert one.shape == shape, "S is [value_heads, key_dim, value_dim]"
        assert one.dtype == torch.float32, "S is float32"
        assert one.is_contiguous(), "S is not contiguous"
        assert one.device == v.device, "S is on another device"
        assert one.data_ptr() % 16 == 0, "S begins at a multiple of 16 bytes"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `gated_delta_rule`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor
    chunks: tuple[Chunk, ...]
    memory: tuple[torch.Tensor, ...]

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        sizes: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (1, 2),
        dims: tuple[int, int] = (16, 16),
    ) -> Arguments:
        """Sequences by their tokens here and before, one after the other; heads and dimensions of keys and values."""
        made = torch.Generator(device).manual_seed(seed)
        chunks, tokens = [], 0
        for length, before in sizes:
            chunks.append(Chunk(tokens, length, before))
            tokens += length

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        counts, widths = (heads[0], *heads), (dims[0], *dims)
        sizes_of = [count * width for count, width in zip(counts, widths, strict=True)]
        parts = torch.split(normal(tokens, sum(sizes_of)).to(dtype), sizes_of, 1)
        q, k, v = (x.view(tokens, *of) for x, *of in zip(parts, counts, widths, strict=True))
        beta, log_decay = normal(tokens, heads[1]).sigmoid(), -0.1 * normal(tokens, heads[1]).abs()
        memory = tuple(normal(heads[1], *dims) / dims[0] ** 0.5 for _ in sizes)
        return cls(q, k, v, beta, log_decay, tuple(chunks), memory)

    def results(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """What `gated_delta_rule` or `reference` makes of them: outputs, and S of each sequence."""
        memory = [one.clone() for one in self.memory]
        return [function(self.q, self.k, self.v, self.beta, self.log_decay, self.chunks, memory), *memory]


def _forgetful(device: torch.device, seed: int) -> Arguments:
    given = Arguments.random(device, seed, [(64, 0)])
    given.log_decay[21] = -1e5
    return given


def _repeated(device: torch.device, seed: int) -> Arguments:
    """Powers of the triangular matrix, by which it could be inverted too, are far larger than its inverse here."""
    given = Arguments.random(device, seed, [(64, 0)])
    given.k.copy_(given.k[:1].clone())
    return replace(given, beta=torch.ones_like(given.beta), log_decay=torch.zeros_like(given.log_decay))


def _cases() -> list[Case[Arguments]]:
    several = [(1, 70), (12, 60)]
    real: dict[str, Any] = {"sizes": [(300, 37), (1, 200), (129, 0), (1000, 64)], "heads": (16, 48), "dims": (128, 128)}
    within = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}

    def case(name: str, dtype: torch.dtype = torch.float32, planted: bool = False, **rest: Any) -> Case[Arguments]:
        make = functools.partial(Arguments.random, dtype=dtype, **rest)
        return Case(name, make, within[dtype], planted, compiled_only="dims" in rest)

    return [
        case("several sequences", sizes=several, heads=(2, 4), planted=True),
        case("more than a block", sizes=[(150, 37)]),
        case("float16", sizes=[(20, 50)], dtype=torch.float16),
        Case("a token that forgets all", _forgetful, within[torch.float32]),
        Case("one key again and again", _repeated, within[torch.float32]),
        case("heads of 128, float32", **real),
        case("heads of 128, bfloat16", torch.bfloat16, **real),
    ]


def _one_later(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "q and k swapped": lambda given: replace(given, q=given.k, k=given.q),
    "heads of keys swapped": lambda given: replace(given, k=given.k.flip(1)),
    "values rounded": lambda given: replace(given, v=given.v.bfloat16().to(given.v.dtype)),
    "beta one token late": lambda given: replace(given, beta=_one_later(given.beta)),
    "decay one token late": lambda given: replace(given, log_decay=_one_later(given.log_decay)),
    "decay left out": lambda given: replace(given, log_decay=torch.zeros_like(given.log_decay)),
    "S not read": lambda given: replace(given, memory=tuple(map(torch.zeros_like, given.memory))),
    "S of another sequence": lambda given: replace(given, memory=(*given.memory[1:], given.memory[0])),
}

KERNEL = Kernel(
    name="gated_delta_rule",
    run=lambda given: given.results(gated_delta_rule),
    reference=lambda given: given.results(reference),
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().prepare, _bodies().advance, _bodies().step],
)
