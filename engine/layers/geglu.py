"""The gated feed-forward layer of Gemma."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.linear import Joined, Linear
from lazyio.engine.layers.rounding import rounded


class GeGlu(nn.Module):
    """y = W_down(gelu(W_gate x) * W_up x), with the tanh form of gelu.

    With `sparsity`, all but that share of the gates, were they normally distributed, are set to 0 and the others
    lowered: gate <- relu(gate - (mean + std * quantile(sparsity))). Source: `Gemma4TextMLP`, `Gemma3nTextMLP`.
    """

    def __init__(self, hidden: int, width: int, sparsity: float = 0.0) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden)
        self._joined = Joined(self.gate_proj, self.up_proj)
        self._quantile = NormalDist().inv_cdf(sparsity) if sparsity else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [tokens, hidden]: [tokens, hidden]."""
        gate, up = self._joined(x)
        if self._quantile is not None:
            gate = _cut(gate, rounded(self._quantile, gate.dtype))
        y: torch.Tensor = self.down_proj(functional.gelu(gate, approximate="tanh") * up)
        return y


def _cut(gate: torch.Tensor, quantile: float) -> torch.Tensor:
    std, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
    return functional.relu(gate - (mean + std * quantile))
