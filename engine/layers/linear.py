"""Linear layers without a bias. What they hold may be packed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.packed import Weight, rows_of, times

# Matrices of fewer rows are read in no time, and other kernels may want their values.
_LEAST_PACKED = 16


class Linear(nn.Module):
    """y = x W^T. `packs` are the names of the weights that may be held packed."""

    weight: Weight

    def __init__(self, inputs: int, outputs: int, *, packs: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.packs = ("weight",) if packs and outputs >= _LEAST_PACKED else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [..., inputs]: [..., outputs]."""
        return times(x, self.weight)


class Embedding(nn.Module):
    """Rows of a weight, by token id. `packs` are the names of the weights that may be held packed."""

    weight: Weight
    packs = ("weight",)
    #: Of the rows of a packed weight.
    packed_dtype = torch.float32

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self.weight.dtype if isinstance(self.weight, torch.Tensor) else self.packed_dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of int64 [n]: [n, width]."""
        if isinstance(self.weight, torch.Tensor):
            return functional.embedding(tokens, self.weight)
        return rows_of(self.weight, tokens, self.packed_dtype)
