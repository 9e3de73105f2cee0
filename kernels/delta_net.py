"""What is around the delta rule in a gated delta net, on a GPU: its convolution, its rates, its norm with a gate.

Each is one launch of a body in delta_net_bodies.py, whatever sequences a ubatch has. engine/layers/gated_delta_net.py
has the formulas, and their source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from lazyio.errors import Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies
from lazyio.kernels.spans import blocks_of, check_kept, places_of

#: Tokens and channels of a program of `convolve`, and its warps.
CONVOLVE = (16, 256, 8)
#: Heads of tokens of a program of `gated_norm`, and its warps.
NORM = (32, 4)
# Tokens and heads of a program of `rates`.
_RATES = 256

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_DIM = 1024


def supports(dtype: torch.dtype, reach: int, dim: int) -> bool:
    """Whether a net with such a convolution and heads of values of this dimension has kernels."""
    return dtype in _DTYPES and 1 <= reach <= CONVOLVE[0] and dim <= _MOST_DIM


def convolve(
    inputs: torch.Tensor, weight: torch.Tensor, spans: Sequence[tuple[int, int]], history: Sequence[torch.Tensor]
) -> torch.Tensor:
    """silu of a causal convolution of each channel, [tokens, channels]; on the current stream, never waits.

    inputs [tokens, channels] and weight [channels, taps], contiguous. `spans` are the first token of each sequence and
    how many it has, one after the other; they have all tokens. `history` has the inputs that the convolution reaches
    back to of each, [taps - 1, channels] in the inputs' dtype, changed in place.
    Raises Unsupported where Triton is missing, and for what has no kernel.
    """
    tokens, channels = inputs.shape
    reach = weight.shape[1] - 1
    _supported(inputs.dtype, reach, 1)
    assert weight.shape[0] == channels, "the convolution has weights for each channel"
    assert inputs.is_contiguous(), "the inputs are not contiguous"
    assert weight.is_contiguous(), "the weights are not contiguous"
    assert len(spans) == len(history) > 0, "every sequence has its history"
    assert sum([length for _, length in spans]) == tokens, "spans have all tokens"
    check_kept(history, (reach, channels), inputs)
    rows, width, warps = CONVOLVE
    width = min(width, _power(channels))
    blocks = blocks_of(tuple(spans), rows, inputs.device)
    out = inputs.new_empty(tokens, channels)  # not like the inputs, of which a single one may have any stride
    _bodies().convolve[(blocks.shape[0], -(-channels // width))](
        *(inputs, weight, blocks, history[0], places_of(history), out),
        CHANNELS=channels,
        REACH=reach,
        ROWS=rows,
        KEPT=_power(reach),
        WIDTH=width,
        num_warps=warps,
    )
    return out


def rates(
    of_beta: torch.Tensor, of_decay: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sigmoid(of_beta) and -exp(log_rate) softplus(of_decay + bias): float32 [tokens, heads].

    of_beta and of_decay [tokens, heads], contiguous, log_rate and bias [heads]; on the current stream, never waits.
    Raises as `convolve` does.
    """
    _supported(of_beta.dtype, 1, 1)
    heads = of_beta.shape[1]
    assert of_beta.shape == of_decay.shape, "both rates are [tokens, heads]"
    assert log_rate.shape == bias.shape == (heads,), "each head has its rate and bias"
    assert of_beta.is_contiguous(), "what gives beta is not contiguous"
    assert of_decay.is_contiguous(), "what gives the decay is not contiguous"
    assert of_beta.device == of_decay.device == log_rate.device == bias.device, "tensors are on different devices"
    beta, log_decay = (torch.empty(of_beta.shape, device=of_beta.device) for _ in range(2))
    _bodies().rates[(-(-of_beta.numel() // _RATES),)](
        *(of_beta, of_decay, log_rate, bias, beta, log_decay, of_beta.numel()), HEADS=heads, BLOCK=_RATES, num_warps=4
    )
    return beta, log_decay


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, gate: str) -> torch.Tensor:
    """weight * rms(x) * gate(z), like x: of x and z [..., dim], contiguous and of one dtype; weight [dim].

    `gate` is "silu" or "sigmoid". On the current stream; never waits. Raises as `convolve` does.
    """
    dim = x.shape[-1]
    _supported(x.dtype, 1, dim)
    assert x.shape == z.shape, "what is normed and what gates it are of one shape"
    assert x.dtype == z.dtype, "what is normed and what gates it are of one dtype"
    assert weight.shape == (dim,), "the norm has a weight for each value"
    assert gate in ("silu", "sigmoid"), "the gate is silu or sigmoid"
    assert x.is_contiguous(), "what is normed is not contiguous"
    assert z.is_contiguous(), "what gates is not contiguous"
    assert x.device == z.device == weight.device, "tensors are on different devices"
    rows, warps = NORM
    out, count = torch.empty_like(x), x.numel() // dim
    _bodies().gated_norm[(-(-count // rows),)](
        *(x, z, weight, out, count, eps), DIM=dim, BLOCK=_power(dim), ROWS=rows, SILU=gate == "silu", num_warps=warps
    )
    return out


def _supported(dtype: torch.dtype, reach: int, dim: int) -> None:
    if not supports(dtype, reach, dim):
        raise Unsupported(
            f"a gated delta net has no kernel for {dtype}, a convolution that reaches {reach} tokens back and heads of "
            f"{dim}: it has those for float32, bfloat16 and float16, 1 to {CONVOLVE[0]} tokens and at most {_MOST_DIM}"
        )


def _power(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _bodies() -> Any:
    return bodies("delta_net_bodies", "the kernel around the delta rule")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of all three."""

    inputs: torch.Tensor
    weight: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    history: tuple[torch.Tensor, ...]
    sides: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # as `rates` takes them
    x: torch.Tensor
    z: torch.Tensor
    norm: torch.Tensor
    eps: float
    gate: str

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        lengths: Sequence[int],
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        gate: str,
    ) -> Arguments:
        """Sequences by how many tokens they have here; channels, taps, heads and their dimension."""
        channels, taps, heads, dim = sizes
        tokens = sum(lengths)
        made = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        return cls(
            normal(tokens, channels).to(dtype),
            normal(channels, taps).to(dtype),
            tuple((sum(lengths[:i]), length) for i, length in enumerate(lengths)),
            tuple(normal(taps - 1, channels).to(dtype) for _ in lengths),
            (normal(tokens, heads).to(dtype), (9 * normal(tokens, heads)).to(dtype), normal(heads), normal(heads)),
            normal(tokens, heads, dim).to(dtype),
            normal(tokens, heads, dim).to(dtype),
            normal(dim).to(dtype),
            0.1,
            gate,
        )

    def run(self) -> list[torch.Tensor]:
        """What the kernels make of them: all results, and the history of each sequence."""
        history = [one.clone() for one in self.history]
        convolved = convolve(self.inputs, self.weight, self.spans, history)
        return [convolved, *rates(*self.sides), gated_norm(self.x, self.z, self.norm, self.eps, self.gate), *history]

    def expected(self) -> list[torch.Tensor]:
        """The same in plain torch, in float32 and on any device."""
        dtype, reach = self.inputs.dtype, self.weight.shape[1] - 1
        convolved, history = [], []
        for (start, length), kept in zip(self.spans, self.history, strict=True):
            joined = torch.cat([kept, self.inputs[start : start + length]])
            windows = joined.float().unfold(0, reach + 1, 1)  # [length, channels, taps]
            convolved.append((windows * self.weight.float()).sum(-1).to(dtype).float())
            history.append(joined[length:])
        of_beta, of_decay, log_rate, bias = (one.float() for one in self.sides)
        wide, z = self.x.float(), self.z.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(dtype)
        scaled = (normed.float() * self.norm.float()).to(dtype).float()
        return [
            functional.silu(torch.cat(convolved)).to(dtype),
            torch.sigmoid(of_beta),
            -log_rate.exp() * functional.softplus(of_decay + bias),
            (scaled * (functional.silu(z) if self.gate == "silu" else torch.sigmoid(z))).to(dtype),
            *history,
        ]


def _cases() -> Sequence[Case[Arguments]]:
    within = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}

    def case(
        name: str, lengths: list[int], dtype: torch.dtype, sizes: tuple[int, int, int, int], gate: str = "sigmoid"
    ) -> Case[Arguments]:
        make = functools.partial(Arguments.random, lengths=lengths, dtype=dtype, sizes=sizes, gate=gate)
        planted = name.startswith("several")
        return Case(name, make, within[dtype], planted, compiled_only=dtype == torch.bfloat16)

    small = (40, 4, 3, 24)
    return [
        case("several sequences", [7, 1, 18], torch.float32, small),
        case("steps, silu", [1, 1], torch.float32, small, "silu"),
        case("float16, two taps", [3, 20], torch.float16, (24, 2, 2, 16)),
        case("48 heads of 128", [300, 1, 2, 64], torch.bfloat16, (10_240, 4, 48, 128)),
        case("a step of 48 heads of 128, silu", [1], torch.bfloat16, (10_240, 4, 48, 128), "silu"),
    ]


def _sides(given: Arguments, place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    sides = list(given.sides)
    sides[place] = change(sides[place])
    return replace(given, sides=(sides[0], sides[1], sides[2], sides[3]))


#: Faults by name.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "taps turned round": lambda given: replace(given, weight=given.weight.flip(1)),
    "taps of another channel": lambda given: replace(given, weight=given.weight.roll(1, 0)),
    "history not read": lambda given: replace(given, history=tuple(map(torch.zeros_like, given.history))),
    "history of another sequence": lambda given: replace(given, history=(*given.history[1:], given.history[0])),
    "a token of another sequence": lambda given: replace(given, spans=((0, 8), (8, 1), (9, 17))),
    "beta of another token": lambda given: _sides(given, 0, lambda x: x.roll(1, 0)),
    "decay of another token": lambda given: _sides(given, 1, lambda x: x.roll(1, 0)),
    "rate of another head": lambda given: _sides(given, 2, lambda x: x.roll(1, 0)),
    "bias left out": lambda given: _sides(given, 3, torch.zeros_like),
    "gate of another head": lambda given: replace(given, z=given.z.roll(1, 1)),
    "the other gate": lambda given: replace(given, gate="silu" if given.gate == "sigmoid" else "sigmoid"),
    "eps left out": lambda given: replace(given, eps=0.0),
    "norm not weighted": lambda given: replace(given, norm=torch.ones_like(given.norm)),
}

KERNEL = Kernel(
    name="delta_net",
    run=Arguments.run,
    reference=Arguments.expected,
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().convolve, _bodies().rates, _bodies().gated_norm],
)
