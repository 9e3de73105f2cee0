"""Hyper-connections: several residual streams, from which each block's input is mixed and which all take its output.

Streams lie side by side in the last dimension: [tokens, streams * hidden]. Source of the formulas:
`Qwen4ExpTextGatedResidual` of transformers. With the streams normed one by one to u,

    g = sigmoid(W_up silu(W_down u / streams))          what each value contributes
    x = mean over streams c of g_c * u_c                the input of a block
    a = 2 sigmoid(W_inject u / streams)                 how much of its output each stream takes
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm


class _Mixing(nn.Module):
    def __init__(self, hidden: int, streams: int, rank: int, eps: float) -> None:
        super().__init__()
        self.hidden, self.streams = hidden, streams
        self.hc_norm = RmsNorm(streams * hidden, eps, offset=1.0, groups=streams)
        self.input_mix_weight_down = Linear(streams * hidden, rank)
        self.input_mix_weight_up = Linear(rank, streams * hidden)

    def _mix(self, normed: torch.Tensor) -> torch.Tensor:
        low = functional.silu(self.input_mix_weight_down(normed) / self.streams)
        gate: torch.Tensor = torch.sigmoid(self.input_mix_weight_up(low))
        return (gate * normed).view(-1, self.streams, self.hidden).mean(1)


class StreamMixer(_Mixing):
    """What comes out of the streams at the end."""

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Of [tokens, streams * hidden]: [tokens, hidden]."""
        return self._mix(self.hc_norm(streams))


class HyperConnection(_Mixing):
    """The residual connection around a block."""

    def __init__(self, hidden: int, streams: int, rank: int, eps: float) -> None:
        super().__init__(hidden, streams, rank, eps)
        self.block_inject_weight = Linear(streams * hidden, streams)

    def forward(self, streams: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The streams [tokens, streams * hidden] with the output of `block` [tokens, hidden] -> same in them."""
        normed = self.hc_norm(streams)
        taken = 2 * torch.sigmoid(self.block_inject_weight(normed) / self.streams)
        output = block(self._mix(normed))
        return streams + (taken[..., None] * output[..., None, :]).flatten(-2)
