"""Linear layers without a bias. What they hold may be packed."""

from __future__ import annotations

from operator import is_not

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.packed import Weight, joined, rows_of, times
from lazyio.kernels.contract import usable
from lazyio.kernels.packed_matmul import MOST_NARROW

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


class Joined:
    """Linear layers of the same x. For few rows, those whose packed weights lie behind one another are one product."""

    def __init__(self, *layers: Linear) -> None:
        self.layers = layers
        self._weights: list[Weight] = []
        self._runs: list[tuple[Weight, list[int]]] = []

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Of x [tokens, inputs]: [tokens, outputs] of each layer, of which tokens may lie apart."""
        if x.shape[0] > MOST_NARROW or not usable(x.device):
            return [layer(x) for layer in self.layers]
        weights = [layer.weight for layer in self.layers]
        if not self._weights or any(map(is_not, weights, self._weights)):
            self._weights, self._runs = weights, joined(weights)
        runs = ((times(x, weight), outputs) for weight, outputs in self._runs)
        return [part for products, outputs in runs for part in torch.split_with_sizes(products, outputs, -1)]


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
