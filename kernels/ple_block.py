"""The block that brings a table of n-grams into a model, on a GPU: all of it but the two products with its rows.

`ple_block` launches the bodies, which are in ple_block_bodies.py. Of what lies between keys, values and the result only
two numbers a token and stream are stored, its gate and the length of what it lets through, and the inputs that the next
tokens of a sequence reach back to. engine/layers/ngram_embedding.py has the formulas, and their source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lazyio.errors import Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies
from lazyio.kernels.spans import blocks_of, check_kept, places_of

#: Tokens and columns of a program of `convolve`, and its warps.
CONVOLVE = (16, 256, 8)
_GATE_WARPS = 4

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_HIDDEN = 16_384
_MOST_REACH = CONVOLVE[0]  # so that only the first block of a sequence reaches back to before it


class Weights(NamedTuple):
    """Those of the block: of norms, [streams * hidden], zero-centred; of the convolution, [streams * hidden, taps]."""

    norm_query: torch.Tensor
    norm_key: torch.Tensor
    norm_conv: torch.Tensor
    conv: torch.Tensor
    dilation: int
    eps: float

    @property
    def reach(self) -> int:
        """Tokens back."""
        return (self.conv.shape[1] - 1) * self.dilation


def supports(dtype: torch.dtype, hidden: int, reach: int) -> bool:
    """Whether a block of these sizes has a kernel."""
    return dtype in _DTYPES and hidden <= _MOST_HIDDEN and reach <= _MOST_REACH


def ple_block(
    streams: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    weights: Weights,
    spans: Sequence[tuple[int, int]],
    history: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What is added to the streams, like them; on the current stream, never waits.

    streams and keys [tokens, streams * hidden], values [tokens, hidden], contiguous and of one dtype: float32, bfloat16
    or float16. `spans` are the first token of each sequence and how many it has, one after the other; they have all
    tokens. `history` has what the convolution reaches back to of each, [reach, streams * hidden], changed in place.
    Raises Unsupported where Triton is missing, and for what has no kernel.
    """
    _check(streams, keys, values, weights, spans, history)
    tokens, hidden = values.shape
    count = streams.shape[1] // hidden
    rows, width, warps = CONVOLVE
    width = min(width, _power(hidden))
    gates = torch.empty(tokens, count, 2, device=streams.device)
    out = torch.empty_like(streams)
    sizes = {"STREAMS": count, "HIDDEN": hidden}
    blocks = blocks_of(tuple(spans), rows, streams.device)
    _bodies().gate[(tokens, count)](
        *(streams, keys, values, weights.norm_query, weights.norm_key, gates, weights.eps),
        **sizes,
        BLOCK=_power(hidden),
        num_warps=_GATE_WARPS,
    )
    _bodies().convolve[(blocks.shape[0], -(-hidden // width), count)](
        *(values, gates, weights.norm_conv, weights.conv, blocks, history[0], places_of(history), out),
        **sizes,
        KERNEL=weights.conv.shape[1],
        DILATION=weights.dilation,
        REACH=weights.reach,
        ROWS=rows,
        KEPT=_power(weights.reach),
        WIDTH=width,
        num_warps=warps,
    )
    return out


def reference(
    streams: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    weights: Weights,
    spans: Sequence[tuple[int, int]],
    history: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What `ple_block` does, in float32 and on any device."""
    dtype, hidden = values.dtype, values.shape[1]
    query, key = (_normed(x, w, weights.eps, hidden) for x, w in zip((streams, keys), weights[:2], strict=True))
    r = (query * key).view(len(values), -1, hidden).sum(-1) / math.sqrt(hidden)
    gate = torch.sigmoid(r.abs().clamp_min(1e-6).sqrt() * r.sign()).to(dtype).float()
    gated = (gate[..., None] * values.float()[:, None]).flatten(1).to(dtype)
    inputs = _normed(gated, weights.norm_conv, weights.eps, hidden).to(dtype)
    outputs = []
    for (start, length), kept in zip(spans, history, strict=True):
        joined = torch.cat([kept, inputs[start : start + length]]).float()
        taps = enumerate(weights.conv.float().unbind(1))
        summed = sum(joined[k * weights.dilation :][:length] * tap for k, tap in taps)
        outputs.append(functional.silu(torch.as_tensor(summed)).to(dtype))
        kept.copy_(joined[length:])
    return (gated.float() + torch.cat(outputs).float()).to(dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, hidden: int) -> torch.Tensor:
    wide = x.float().view(len(x), -1, hidden)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).flatten(1) * (1 + weight.float())


def _power(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _bodies() -> Any:
    return bodies("ple_block_bodies", "the kernel of the block of a table of n-grams")


def _check(
    streams: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    weights: Weights,
    spans: Sequence[tuple[int, int]],
    history: Sequence[torch.Tensor],
) -> None:
    tokens, hidden = values.shape
    width = streams.shape[1]
    if not supports(values.dtype, hidden, weights.reach):
        raise Unsupported(
            f"the block of a table of n-grams has no kernel for {values.dtype}, streams of {hidden} and a convolution "
            f"that reaches {weights.reach} tokens back: it is for float32, bfloat16 and float16, at most {_MOST_HIDDEN}"
            f" values and {_MOST_REACH} tokens"
        )
    assert streams.shape == keys.shape == (tokens, width), "streams and keys are [tokens, streams * hidden]"
    assert width % hidden == 0, "streams lie side by side"
    assert streams.dtype == keys.dtype == values.dtype, "streams, keys and values are of one dtype"
    assert streams.is_contiguous(), "the streams are not contiguous"
    assert keys.is_contiguous(), "the keys are not contiguous"
    assert values.is_contiguous(), "the values are not contiguous"
    assert all(one.shape == (width,) for one in weights[:3]), "norms have a weight for each value"
    assert weights.conv.shape[0] == width, "the convolution has weights for each value"
    assert weights.conv.is_contiguous(), "the weights of the convolution are not contiguous"
    assert len(spans) == len(history) > 0, "every sequence has its history"
    assert sum([length for _, length in spans]) == tokens, "spans have all tokens"
    assert values.device == streams.device == keys.device, "tensors are on different devices"
    check_kept(history, (weights.reach, width), values)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `ple_block`."""

    streams: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    weights: Weights
    spans: tuple[tuple[int, int], ...]
    history: tuple[torch.Tensor, ...]

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        lengths: Sequence[int],
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int, int, int] = (3, 24, 4, 3),
    ) -> Arguments:
        """Sequences by how many tokens they have here; streams, their size, taps and dilation."""
        count, hidden, taps, dilation = sizes
        made = torch.Generator(device).manual_seed(seed)
        width, tokens = count * hidden, sum(lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        apart = torch.logspace(-1, 1, count, device=device).repeat_interleave(hidden)
        streams = normal(tokens, width)
        norms = (0.5 * normal(3, width)).to(dtype)
        keys, values = ((streams + normal(tokens, width)) * apart.flip(0)).to(dtype), normal(tokens, hidden).to(dtype)
        weights = Weights(norms[0], norms[1], norms[2], normal(width, taps).to(dtype), dilation, 0.1)
        spans = tuple((sum(lengths[:i]), length) for i, length in enumerate(lengths))
        history = tuple(normal(weights.reach, width).to(dtype) for _ in lengths)
        return cls((streams * apart).to(dtype), keys, values, weights, spans, history)

    def results(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """What `ple_block` or `reference` makes of them: what is added, and the history of each sequence."""
        history = [one.clone() for one in self.history]
        return [function(self.streams, self.keys, self.values, self.weights, self.spans, history), *history]


def _cases() -> Sequence[Case[Arguments]]:
    within = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}

    def case(
        name: str, lengths: list[int], dtype: torch.dtype = torch.float32, planted: bool = False, real: bool = False
    ) -> Case[Arguments]:
        sizes = (4, 2560, 4, 3) if real else (3, 24, 4, 3)
        make = functools.partial(Arguments.random, lengths=lengths, dtype=dtype, sizes=sizes)
        return Case(name, make, within[dtype], planted, compiled_only=real)

    return [
        case("several sequences", [7, 1, 12], planted=True),
        case("more than a block", [35]),
        case("steps", [1, 1, 1]),
        case("float16", [4, 11], torch.float16),
        case("four streams of 2,560", [300, 1, 5, 64], torch.bfloat16, real=True),
        case("steps of four streams of 2,560", [1] * 5, torch.bfloat16, real=True),
    ]


def _weights(given: Arguments, **changed: Any) -> Arguments:
    return replace(given, weights=given.weights._replace(**changed))


def _turned(x: torch.Tensor, given: Arguments) -> torch.Tensor:
    """That of the stream before in the place of each."""
    return x.roll(given.values.shape[1], 0)


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "keys of another stream": lambda given: replace(given, keys=given.keys.roll(given.values.shape[1], 1)),
    "values one token late": lambda given: replace(given, values=given.values.roll(1, 0)),
    "gate turned": lambda given: replace(given, keys=-given.keys),
    "norms swapped": lambda given: _weights(
        given, norm_query=given.weights.norm_conv, norm_conv=given.weights.norm_query
    ),
    "norm of another stream": lambda given: _weights(given, norm_key=_turned(given.weights.norm_key, given)),
    "norm not zero-centred": lambda given: _weights(given, norm_conv=given.weights.norm_conv - 1),
    "eps left out": lambda given: _weights(given, eps=0.0),
    "taps turned round": lambda given: _weights(given, conv=given.weights.conv.flip(1)),
    "taps of another stream": lambda given: _weights(given, conv=_turned(given.weights.conv, given)),
    "history not read": lambda given: replace(given, history=tuple(map(torch.zeros_like, given.history))),
    "history of another sequence": lambda given: replace(given, history=(*given.history[1:], given.history[0])),
    "a token of another sequence": lambda given: replace(given, spans=((0, 8), (8, 1), (9, 11))),
}

KERNEL = Kernel(
    name="ple_block",
    run=lambda given: given.results(ple_block),
    reference=lambda given: given.results(reference),
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().gate, _bodies().convolve],
)
