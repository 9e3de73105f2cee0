"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.linear import Joined, Linear


class SiluMlp(nn.Module):
    """y = W_down(silu(W_gate x) * W_up x). Source: `Qwen3_5MLP` of transformers."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden)
        self._joined = Joined(self.gate_proj, self.up_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [tokens, hidden]: [tokens, hidden]."""
        gate, up = self._joined(x)
        y: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return y
