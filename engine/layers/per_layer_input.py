"""What the table of Gemma is for: a small input of each token to every layer, apart from the residual."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.ubatch import Rows


class PerLayerInputs:
    """(context + scale * row) * mean_scale of each layer, where the row's values lie layer after layer.

    `context` [tokens, layers, width] comes from the embeddings, the rows from the table. They are waited for when a
    layer first takes its input. Source: `Gemma4TextModel.project_per_layer_inputs` of transformers.
    """

    def __init__(self, context: torch.Tensor, rows: Rows, *, scale: float, mean_scale: float) -> None:
        self._context, self._rows = context, rows
        self._scale, self._mean_scale = scale, mean_scale
        self._inputs: torch.Tensor | None = None

    def of(self, layer: int) -> torch.Tensor:
        """The input of that layer, [tokens, width]."""
        if self._inputs is None:
            rows = self._rows.values().view(self._context.shape)
            self._inputs = (self._context + rows * self._scale) * self._mean_scale
        return self._inputs[:, layer]


class TakesPerLayerInput(nn.Module):
    """Layer number `layer`, with an input of its own: norm(W_projection(gelu(W_gate x) * input)); none with width 0."""

    def __init__(self, layer: int, hidden: int, width: int, eps: float) -> None:
        super().__init__()
        self._layer = layer
        if width:
            self.per_layer_input_gate = Linear(hidden, width)
            self.per_layer_projection = Linear(width, hidden)
            self.post_per_layer_input_norm = RmsNorm(hidden, eps)

    def taken(self, x: torch.Tensor, inputs: PerLayerInputs) -> torch.Tensor:
        """What its input adds, gated by x [tokens, hidden]: [tokens, hidden]."""
        # The gate comes first, so that it is under way while the first layer waits for rows.
        gate = functional.gelu(self.per_layer_input_gate(x), approximate="tanh")
        mixed: torch.Tensor = self.per_layer_projection(gate * inputs.of(self._layer))
        normed: torch.Tensor = self.post_per_layer_input_norm(mixed)
        return normed
