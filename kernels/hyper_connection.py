"""Hyper-connections on a GPU: what a block gave added to all streams and their norm in one pass, and the mixing.

`connect` and `mix` launch the bodies, which are in hyper_connection_bodies.py; the product with W_down, between them,
is the library's. engine/layers/hyper_connection.py has the formulas, and their source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lazyio.errors import Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Values of a stream that a program holds in registers, at most.
_MOST_HIDDEN = 16_384


class Given(NamedTuple):
    """What a block gave, and how much of it each stream takes: 2 sigmoid(sum over parts of the logits / streams)."""

    output: torch.Tensor  # [tokens, hidden]
    logits: torch.Tensor  # float32 [tokens, parts, streams]


class Norm(NamedTuple):
    """The norm of each stream, its weight [streams * hidden] zero-centred, and W_inject [streams, streams * hidden]."""

    weight: torch.Tensor
    eps: float
    inject: torch.Tensor | None = None


class Connected(NamedTuple):
    """Streams, and where asked for their norm and the logits of each stream, float32 [tokens, streams, streams]."""

    streams: torch.Tensor
    normed: torch.Tensor | None
    logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Config:
    """How `mix` is launched."""

    tokens: int  # for so many at most
    rows: int  # tokens of a program
    width: int  # its columns of a stream
    warps: int
    stages: int
    activate: bool = False  # the activation is done on the way, again for each part of the columns


#: Tokens of a program of `connect`, and its warps.
CONNECT = (2, 4)
#: The first that has room for the tokens. Chosen for four streams of 2,560 and rank 320 on an H200.
MIX = (Config(16, 16, 16, 4, 3, True), Config(1 << 62, 64, 32, 4, 3, False))
#: Columns of a program of `blend`, and its warps.
BLEND = (1024, 4)
# Of the rank, multiplied at once.
_PART = 64


def supports(dtype: torch.dtype, streams: int, hidden: int) -> bool:
    """Whether streams of this dtype and these sizes have a kernel."""
    return dtype in _DTYPES and streams <= 16 and hidden <= _MOST_HIDDEN


def connect(streams: torch.Tensor, count: int, given: Given | None = None, norm: Norm | None = None) -> Connected:
    """Add what a block gave to `count` streams, and norm them; on the current stream, never waits.

    streams [tokens, count * hidden], contiguous and left as they are, float32, bfloat16 or float16; so are all others
    but logits. The sum is rounded to that dtype before the norm, and the norm before its logits.
    Raises Unsupported where Triton is missing, and for what has no kernel.
    """
    _check(streams, count, given, norm)
    tokens, hidden = streams.shape[0], streams.shape[1] // count
    after = streams if given is None else torch.empty_like(streams)
    normed = logits = None
    if norm is not None:
        normed = torch.empty_like(streams)
        if norm.inject is not None:
            logits = torch.empty(tokens, count, count, device=streams.device)
    rows, warps = CONNECT
    _bodies().connect[(-(-tokens // rows), count)](
        *(streams, *(given or (None, None))),
        *((None, None) if norm is None else (norm.weight, norm.inject)),
        *(after, normed, logits, tokens, 0.0 if norm is None else norm.eps),
        STREAMS=count,
        HIDDEN=hidden,
        BLOCK=_power(hidden),
        ROWS=rows,
        PARTS=0 if given is None else given.logits.shape[1],
        NORM=norm is not None,
        INJECT=logits is not None,
        num_warps=warps,
    )
    return Connected(after, normed, logits)


def mix(low: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, count: int) -> torch.Tensor:
    """The input of a block, [tokens, hidden]: mean over streams of sigmoid(W_up silu(low / count)) * normed.

    low [tokens, rank], up [count * hidden, rank], normed [tokens, count * hidden]: contiguous, of one dtype. On the
    current stream; never waits. Raises as `connect` does.
    """
    return _mixed(low, up, normed, count, next(config for config in MIX if normed.shape[0] <= config.tokens))


def blend(gate: torch.Tensor, normed: torch.Tensor, count: int) -> torch.Tensor:
    """What `mix` gives, from gate = W_up silu(low / count), [tokens, count * hidden]: for weights it can't multiply."""
    assert gate.shape == normed.shape, "the gate is that of all streams"
    assert gate.is_contiguous(), "the gate is not contiguous"
    _check(normed, count, None, None)
    tokens, hidden = normed.shape[0], normed.shape[1] // count
    out = normed.new_empty(tokens, hidden)
    width, warps = BLEND
    width = min(width, _power(hidden))
    _bodies().blend[(tokens, -(-hidden // width))](
        *(gate, normed, out), STREAMS=count, HIDDEN=hidden, WIDTH=width, num_warps=warps
    )
    return out


def _mixed(low: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, count: int, config: Config) -> torch.Tensor:
    _check_mix(low, up, normed, count)
    tokens, hidden = normed.shape[0], normed.shape[1] // count
    out = normed.new_empty(tokens, hidden)
    _bodies().mix[(-(-tokens // config.rows), -(-hidden // config.width))](
        *(low if config.activate else functional.silu(low / count), up, normed, out, tokens),
        STREAMS=count,
        HIDDEN=hidden,
        RANK=up.shape[1],
        BESIDE=_power(count),
        ROWS=config.rows,
        WIDTH=config.width,
        PART=_PART,
        ACTIVATE=config.activate,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def reference(
    streams: torch.Tensor, count: int, given: Given, norm: Norm, down: torch.Tensor, up: torch.Tensor
) -> list[torch.Tensor]:
    """The streams with what was given, their norm, its logits and the input of a block, on any device, in float32."""
    assert norm.inject is not None
    parts = _apart(streams, count)
    taken = 2 * torch.sigmoid(given.logits.sum(1) / count)
    after = (parts + taken[..., None] * given.output.float()[:, None]).to(streams.dtype)
    wide = after.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    normed = ((wide * scale).flatten(1) * (1 + norm.weight.float())).to(streams.dtype)
    logits = torch.einsum("tcx,jcx->tcj", _apart(normed, count), _apart(norm.inject, count))
    low = functional.silu((normed.float() @ down.float().T).to(streams.dtype) / count)
    gate = torch.sigmoid(low.float() @ up.float().T)
    mixed = _apart(gate * normed.float(), count).mean(1)
    return [after.flatten(1), normed, logits, mixed.to(streams.dtype)]


def _apart(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.float().view(len(x), count, -1)


def _power(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _bodies() -> Any:
    return bodies("hyper_connection_bodies", "the kernel of hyper-connections")


def _check(streams: torch.Tensor, count: int, given: Given | None, norm: Norm | None) -> None:
    tokens, width = streams.shape
    hidden = width // count
    if not supports(streams.dtype, count, hidden):
        raise Unsupported(
            f"hyper-connections have no kernel for {streams.dtype} and {count} streams of {hidden}: it is for float32,"
            f" bfloat16 and float16, at most 16 streams and {_MOST_HIDDEN} values of each"
        )
    assert tokens > 0, "there are no tokens"
    assert count * hidden == width, "streams lie side by side"
    assert streams.is_contiguous(), "the streams are not contiguous"
    if given is not None:
        assert given.output.shape == (tokens, hidden), "the output is [tokens, hidden]"
        assert given.output.dtype == streams.dtype, "the output is of another dtype"
        assert given.logits.shape[::2] == (tokens, count), "logits are [tokens, parts, streams]"
        assert given.logits.dtype == torch.float32, "logits are float32"
        assert given.output.is_contiguous(), "the output is not contiguous"
        assert given.logits.is_contiguous(), "the logits are not contiguous"
        assert given.output.device == given.logits.device == streams.device, "tensors are on different devices"
    if norm is not None:
        assert norm.weight.shape == (width,), "the norm has a weight for each value"
        assert norm.weight.device == streams.device, "the norm is on another device"
        assert norm.inject is None or norm.inject.shape == (count, width), "W_inject is [streams, streams * hidden]"
        assert norm.inject is None or norm.inject.is_contiguous(), "W_inject is not contiguous"


def _check_mix(low: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, count: int) -> None:
    _check(normed, count, None, None)
    assert low.shape == (normed.shape[0], up.shape[1]), "low is [tokens, rank]"
    assert up.shape[0] == normed.shape[1], "W_up is [streams * hidden, rank]"
    assert low.dtype == up.dtype == normed.dtype, "matrices are of one dtype"
    assert low.is_contiguous(), "low is not contiguous"
    assert up.is_contiguous(), "W_up is not contiguous"
    assert low.device == up.device == normed.device, "tensors are on different devices"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of a block: `connect`, W_down, and `mix` in both ways that it is launched."""

    streams: torch.Tensor
    count: int
    given: Given
    norm: Norm
    down: torch.Tensor
    up: torch.Tensor

    @classmethod
    def random(
        cls, device: torch.device, seed: int, tokens: int, count: int, hidden: int, rank: int, dtype: torch.dtype
    ) -> Arguments:
        """Streams of different sizes, so that it matters which of them a norm is over."""
        made = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        width = count * hidden
        sizes = torch.logspace(-1, 1, count, device=device).repeat_interleave(hidden)
        inject = (normal(count, width) * count * width**-0.5).to(dtype)
        return cls(
            (normal(tokens, width) * sizes).to(dtype),
            count,
            Given(normal(tokens, hidden).to(dtype), normal(tokens, count, count)),
            Norm((0.5 * normal(width)).to(dtype), 0.1, inject),
            (normal(rank, width) * count * width**-0.5).to(dtype),
            (normal(width, rank) * 4 * rank**-0.5).to(dtype),
        )

    def run(self) -> list[torch.Tensor]:
        """Streams, norm, logits; and the input of a block by each launch of `mix`, and by `blend`."""
        after, normed, logits = connect(self.streams, self.count, self.given, self.norm)
        assert normed is not None
        assert logits is not None
        low = normed @ self.down.T
        gate = functional.silu(low / self.count) @ self.up.T
        mixed = [_mixed(low, self.up, normed, self.count, config) for config in MIX]
        return [after, normed, logits, *mixed, blend(gate, normed, self.count)]

    def expected(self) -> list[torch.Tensor]:
        """The same by `reference`."""
        *rest, mixed = reference(self.streams, self.count, self.given, self.norm, self.down, self.up)
        return [*rest, *[mixed] * (len(MIX) + 1)]


def _cases() -> Sequence[Case[Arguments]]:
    within = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}

    def case(name: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, planted: bool = False) -> Case[Arguments]:
        tokens, count, hidden, rank = sizes
        make = functools.partial(Arguments.random, tokens=tokens, count=count, hidden=hidden, rank=rank, dtype=dtype)
        return Case(name, make, within[dtype], planted, compiled_only=dtype == torch.bfloat16)

    return [
        case("three streams", (5, 3, 40, 24), torch.float32, planted=True),
        case("one token", (1, 4, 64, 70), torch.float32),
        case("float16", (3, 2, 24, 16), torch.float16),
        case("four streams of 2,560", (131, 4, 2560, 320), torch.bfloat16),
        case("a step of four streams of 2,560", (1, 4, 2560, 320), torch.bfloat16),
    ]


def _given(given: Arguments, **changed: torch.Tensor) -> Arguments:
    return replace(given, given=given.given._replace(**changed))


def _norm(given: Arguments, **changed: Any) -> Arguments:
    return replace(given, norm=given.norm._replace(**changed))


def _inject(given: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    assert given.norm.inject is not None
    return _norm(given, inject=change(given.norm.inject))


def _turned(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """That of the stream before in the place of each."""
    return x.roll(x.shape[dim] // count, dim)


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "output not added": lambda given: _given(given, output=torch.zeros_like(given.given.output)),
    "output of another token": lambda given: _given(given, output=given.given.output.roll(1, 0)),
    "a part of the logits lost": lambda given: _given(given, logits=given.given.logits[:, 1:].contiguous()),
    "streams that take swapped": lambda given: _given(given, logits=given.given.logits.flip(2)),
    "norm of another stream": lambda given: _norm(given, weight=_turned(given.norm.weight, given.count, 0)),
    "norm not zero-centred": lambda given: _norm(given, weight=given.norm.weight - 1),
    "eps left out": lambda given: _norm(given, eps=0.0),
    "logits of another stream": lambda given: _inject(given, lambda x: _turned(x, given.count, 1)),
    "logits swapped": lambda given: _inject(given, lambda x: x.flip(0)),
    "gate of another stream": lambda given: replace(given, up=_turned(given.up, given.count, 0)),
    "end of the rank lost": lambda given: replace(given, up=_without_end(given.up)),
    "end of the width lost": lambda given: replace(given, down=_without_end(given.down)),
}


def _without_end(matrix: torch.Tensor) -> torch.Tensor:
    lacking = matrix.clone()
    lacking[:, -1] = 0
    return lacking


KERNEL = Kernel(
    name="hyper_connection",
    run=Arguments.run,
    reference=Arguments.expected,
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().connect, _bodies().mix, _bodies().blend],
)
