"""Factors as a model of less precision has them."""

from __future__ import annotations

from functools import cache

import torch


@cache
def rounded(factor: float, dtype: torch.dtype) -> float:
    """The number of `dtype` that is next to `factor`."""
    return float(torch.tensor(factor, dtype=dtype, device="cpu"))
