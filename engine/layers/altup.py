"""Alternating updates of Gemma 3n: several residual streams, of which a layer computes one and predicts the others."""

from __future__ import annotations

import torch
from torch import nn

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm

# The mean square of a stream that is rescaled is taken to be no less than this.
_LEAST_MEAN_SQUARE = 1e-5


class AltUp(nn.Module):
    """Predicts all streams before a layer and corrects them by what the layer made of the first.

    With the router m(x) = tanh(W_router(norm(x) / hidden)), streams X and their predictions P,

        P_j = X_j + sum_i X_i (W_prediction m(X_0))[j * streams + i]
        X_j = P_j + (y - P_0) (1 + (W_correction m(y))_j)

    where y is what the layer made of P_0. Source: `Gemma3nTextAltUp` of transformers.
    """

    def __init__(self, streams: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.streams, self.hidden = streams, hidden
        self.correct_output_scale = nn.Parameter(torch.empty(hidden))
        self.correction_coefs = Linear(streams, streams)
        self.prediction_coefs = Linear(streams, streams**2)
        self.modality_router = Linear(hidden, streams)
        self.router_norm = RmsNorm(hidden, eps)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Of X [tokens, streams, hidden]: P [tokens, streams, hidden]."""
        mix: torch.Tensor = self.prediction_coefs(self._routed(streams[:, 0])).view(-1, self.streams, self.streams)
        return streams + mix @ streams

    def correct(self, predicted: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Of P [tokens, streams, hidden] and y [tokens, hidden]: X [tokens, streams, hidden]."""
        share: torch.Tensor = self.correction_coefs(self._routed(active)) + 1.0
        return predicted + (active - predicted[:, 0])[:, None] * share[:, :, None]

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.modality_router(self.router_norm(x) * (1.0 / self.hidden))
        return torch.tanh(routed.float()).to(x.dtype)


class Laurel(nn.Module):
    """A residual around a matrix of low rank: x + norm(W_right W_left x). Source: `Gemma3nTextLaurelBlock`."""

    def __init__(self, hidden: int, rank: int, eps: float) -> None:
        super().__init__()
        self.linear_left = Linear(hidden, rank)
        self.linear_right = Linear(rank, hidden)
        self.post_laurel_norm = RmsNorm(hidden, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [tokens, hidden]: [tokens, hidden]."""
        normed: torch.Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return x + normed


def rescaled(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x [tokens, hidden] with the root mean square of `like` [tokens, hidden], computed in float32."""
    wide = x.float()
    wanted = _mean_square(like.float()).sqrt()
    return (wide * wanted / _mean_square(wide).clamp(min=_LEAST_MEAN_SQUARE).sqrt()).to(x.dtype)


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True)
