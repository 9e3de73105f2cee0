"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import nn


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) over the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class RmsNorm(nn.Module):
    """y = rms(x) * (offset + w), in float32, then x's dtype. `offset` is 1 where weights are stored zero-centred.

    With `groups`, x is normalised in so many equal parts of its last dimension. Source: `Qwen4ExpTextRMSNorm` and
    `Gemma4RMSNorm` of transformers.
    """

    def __init__(self, width: int, eps: float, *, offset: float = 0.0, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.offset, self.groups = eps, offset, groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [..., width]."""
        parts = x.reshape(*x.shape[:-1], self.groups, -1) if self.groups > 1 else x
        scale = self.weight.float() + self.offset if self.offset else self.weight.float()
        return (rms(parts, self.eps).view(x.shape) * scale).to(x.dtype)
