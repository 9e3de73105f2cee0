"""The block that brings a table of n-grams into a model: its rows, gated by what the model knows at each token."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.state import Recent
from lazyio.engine.ubatch import Rows, Ubatch
from lazyio.kernels.contract import usable
from lazyio.kernels.ple_block import Weights, ple_block, supports


class DilatedConv(nn.Module):
    """A causal depthwise convolution over tokens: y_t = sum over k of w_k x_{t - (kernel - 1 - k) * dilation}.

    What lies before the start of a sequence is zero. Sums are in float32 and their order does not depend on where a
    prompt is cut. Parameter: weight [width, 1, kernel].
    """

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, kernel))
        self.dilation = dilation
        self.reach = (kernel - 1) * dilation  # tokens back

    def new_piece(self, capacity: int, dtype: torch.dtype, device: torch.device) -> Recent:
        """The inputs that a sequence's next tokens reach back to."""
        return Recent(self.reach, len(self.weight), dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, ubatch: Ubatch) -> torch.Tensor:
        """Of x [tokens, width]: float32 of the same shape."""
        return torch.cat([self._over(span.state.pieces[self].extend(x[span.here])) for span in ubatch.spans])

    def _over(self, joined: torch.Tensor) -> torch.Tensor:
        tokens = len(joined) - self.reach
        total = torch.zeros(tokens, joined.shape[1], dtype=torch.float32, device=joined.device)
        for k, weight in enumerate(self.weight[:, 0].float().unbind(-1)):
            total.addcmul_(joined[k * self.dilation : k * self.dilation + tokens].float(), weight)
        return total


class NgramEmbedding(nn.Module):
    """What the rows of a token's n-grams add to each residual stream.

    E are the values of all rows of a token; streams lie side by side, and norms are of each stream alone:

        r_c    = norm_key(W_key E)_c . norm_query(s)_c / sqrt(hidden)
        gate_c = sigmoid(sign(r_c) * sqrt(max(|r_c|, 1e-6)))
        v_c    = gate_c * W_value E
        y      = v + silu(conv(norm_conv(v)))

    Source: `Qwen4ExpTextPLELayer` of transformers.
    """

    def __init__(self, hidden: int, streams: int, row_values: int, kernel: int, dilation: int, eps: float) -> None:
        """`row_values` are those of all rows of a token together."""
        super().__init__()
        self.hidden, self.streams = hidden, streams
        self.key_proj = Linear(row_values, streams * hidden)
        self.value_proj = Linear(row_values, hidden)
        self.norm_key, self.norm_query, self.norm_conv = (
            RmsNorm(streams * hidden, eps, offset=1.0, groups=streams) for _ in range(3)
        )
        self.conv1d = DilatedConv(streams * hidden, kernel, dilation)

    def forward(self, streams: torch.Tensor, ubatch: Ubatch, rows: Rows) -> torch.Tensor:
        """What to add to the streams [tokens, streams * hidden]; same shape. Waits for the rows as late as it can."""
        if self._fused(streams):
            values = rows.values()
            return self._by_kernel(streams, self.key_proj(values), self.value_proj(values), ubatch)
        query = self.norm_query(streams)
        values = rows.values()
        gate = self._gate(self.norm_key(self.key_proj(values)), query)
        gated: torch.Tensor = (gate[..., None] * self.value_proj(values)[:, None]).flatten(-2)
        return gated + functional.silu(self.conv1d(self.norm_conv(gated), ubatch)).to(gated.dtype)

    def _fused(self, streams: torch.Tensor) -> bool:
        """Whether kernels do the work: float32 is left to torch, whose results are the ones to compare with."""
        has = supports(streams.dtype, self.hidden, self.conv1d.reach)
        return usable(streams.device) and streams.dtype != torch.float32 and has

    def _by_kernel(
        self, streams: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ubatch: Ubatch
    ) -> torch.Tensor:
        norms = (self.norm_query.weight, self.norm_key.weight, self.norm_conv.weight)
        weights = Weights(*norms, self.conv1d.weight[:, 0], self.conv1d.dilation, self.norm_conv.eps)
        history = [span.state.pieces[self.conv1d].entries for span in ubatch.spans]
        return ple_block(streams, keys, values, weights, [(span.start, span.length) for span in ubatch.spans], history)

    def _gate(self, key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        products = (key * query).view(-1, self.streams, self.hidden)
        r = products.sum(-1, dtype=torch.float32) / math.sqrt(self.hidden)
        return torch.sigmoid(r.abs().clamp_min(1e-6).sqrt() * r.sign()).to(key.dtype)
