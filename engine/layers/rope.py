"""Rotary position embeddings."""

from __future__ import annotations

from functools import cache

import torch

from lazyio.engine.layers.norm import RmsNorm
from lazyio.kernels.contract import usable
from lazyio.kernels.norm_rotate import norm_rotate, supports


class Rope:
    """Rotates pairs (i, i + half) of the first 2 * half dimensions of a head by position * frequency[i].

    Angles are computed in float32 and their cosines rounded to the dtype of what they rotate, as transformers does.
    """

    def __init__(self, theta: float, dims: int, *, of_dims: int | None = None, rotated: int | None = None) -> None:
        """frequency[i] = theta ** (-2 i / of_dims) for i < rotated / 2, 0 for the rest of the dims / 2 pairs.

        `of_dims` and `rotated` are `dims` unless given: "proportional" ropes pair all dimensions of a head and rotate
        only the first few pairs.
        """
        self.dims, self._theta = dims, theta
        self._of_dims, self._rotated = of_dims or dims, dims if rotated is None else rotated

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, 1, dims / 2] of int64 positions [tokens], for `rotate`."""
        frequency = _frequencies(self._theta, self.dims, self._of_dims, self._rotated, positions.device)
        angle = positions.float()[:, None, None] * frequency
        return angle.cos().to(dtype), angle.sin().to(dtype)


# They are the same for all steps.
@cache
def _frequencies(theta: float, dims: int, of_dims: int, rotated: int, device: torch.device) -> torch.Tensor:
    """Of pairs of dimensions, float32 [dims / 2]."""
    index = torch.arange(0, dims, 2, dtype=torch.float32, device=device)
    return torch.where(index < rotated, 1.0 / theta ** (index / of_dims), 0.0)


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim]; dimensions beyond twice the angles stay as they are."""
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def norm_and_rotate(norm: RmsNorm, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """rotate(norm(x), angles) of x [tokens, heads, head_dim], in one pass where there is a kernel."""
    if usable(x.device) and supports(x.shape[-1]) and norm.groups == 1:
        return norm_rotate(x, norm.weight, angles, eps=norm.eps, offset=norm.offset)
    return rotate(norm(x), angles)
