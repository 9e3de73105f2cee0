"""Linear layers without a bias."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Linear(nn.Module):
    """y = x W^T."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [..., inputs]: [..., outputs]."""
        return functional.linear(x, self.weight)


class Embedding(nn.Module):
    """Rows of a weight, by token id."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of int64 [n]: [n, width]."""
        return functional.embedding(tokens, self.weight)
