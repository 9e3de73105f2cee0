"""Hyper-connections: several residual streams, from which each block's input is mixed and which all take its output.

Streams lie side by side in the last dimension: [tokens, streams * hidden]. Source of the formulas:
`Qwen4ExpTextGatedResidual` of transformers. With the streams normed one by one to u,

    g = sigmoid(W_up silu(W_down u / streams))          what each value contributes
    x = mean over streams c of g_c * u_c                the input of a block
    a = 2 sigmoid(W_inject u / streams)                 how much of its output each stream takes

What a block gave is added where the streams are read next, which for the norm of the next block is one pass over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.kernels.contract import usable
from lazyio.kernels.hyper_connection import Given, Norm, blend, connect, mix, supports


@dataclass(frozen=True, slots=True)
class Streams:
    """Residual streams [tokens, count * hidden], to which `given` is yet to be added."""

    before: torch.Tensor
    count: int
    given: Given | None = None

    def now(self) -> torch.Tensor:
        """The streams with all that was given to them."""
        if self.given is None:
            return self.before
        if self.fused:
            return connect(self.before, self.count, self.given).streams
        taken = 2 * torch.sigmoid(self.given.logits.sum(1) / self.count)
        return self.before + (taken[..., None] * self.given.output[..., None, :]).flatten(-2)

    @property
    def fused(self) -> bool:
        """Whether kernels do the work: float32 is left to torch, whose results are the ones to compare with."""
        x = self.before
        hidden = x.shape[1] // self.count
        return usable(x.device) and x.dtype != torch.float32 and supports(x.dtype, self.count, hidden)


class _Mixing(nn.Module):
    def __init__(self, hidden: int, streams: int, rank: int, eps: float) -> None:
        super().__init__()
        self.hidden, self.streams = hidden, streams
        self.hc_norm = RmsNorm(streams * hidden, eps, offset=1.0, groups=streams)
        self.input_mix_weight_down = Linear(streams * hidden, rank)
        self.input_mix_weight_up = Linear(rank, streams * hidden)

    def _mix(self, normed: torch.Tensor, fused: bool) -> torch.Tensor:
        low = self.input_mix_weight_down(normed)
        up = _plain(self.input_mix_weight_up, normed.dtype) if fused else None
        if up is not None:
            return mix(low, up, normed, self.streams)
        gate = self.input_mix_weight_up(functional.silu(low / self.streams))
        if fused:
            return blend(gate, normed, self.streams)
        return (torch.sigmoid(gate) * normed).view(-1, self.streams, self.hidden).mean(1)

    def _norm(self, inject: torch.Tensor | None = None) -> Norm:
        return Norm(self.hc_norm.weight, self.hc_norm.eps, inject)


class StreamMixer(_Mixing):
    """What comes out of the streams at the end."""

    def forward(self, streams: Streams) -> torch.Tensor:
        """Of [tokens, streams * hidden]: [tokens, hidden]."""
        if not streams.fused:
            return self._mix(self.hc_norm(streams.now()), fused=False)
        normed = connect(streams.before, self.streams, streams.given, self._norm()).normed
        assert normed is not None
        return self._mix(normed, fused=True)


class HyperConnection(_Mixing):
    """The residual connection around a block."""

    def __init__(self, hidden: int, streams: int, rank: int, eps: float) -> None:
        super().__init__(hidden, streams, rank, eps)
        self.block_inject_weight = Linear(streams * hidden, streams)

    def forward(self, streams: Streams, block: Callable[[torch.Tensor], torch.Tensor]) -> Streams:
        """The streams, and what `block` gives for the [tokens, hidden] mixed of them; same in what it returns."""
        fused = streams.fused
        now, normed, logits = self._read(streams, fused)
        return Streams(now, self.streams, Given(block(self._mix(normed, fused)), logits))

    def _read(self, streams: Streams, fused: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The streams with what was given, their norm, and the logits of what they take, [tokens, parts, streams]."""
        if not fused:
            now = streams.now()
            normed = self.hc_norm(now)
            return now, normed, self.block_inject_weight(normed)[:, None]
        norm = self._norm(_plain(self.block_inject_weight, streams.before.dtype))
        now, found, logits = connect(streams.before, self.streams, streams.given, norm)
        assert found is not None
        return now, found, self.block_inject_weight(found).float()[:, None] if logits is None else logits


def _plain(linear: Linear, dtype: torch.dtype) -> torch.Tensor | None:
    """Its weight, if that is a matrix as it is multiplied."""
    weight = linear.weight
    return weight if isinstance(weight, torch.Tensor) and weight.dtype == dtype and weight.is_contiguous() else None
