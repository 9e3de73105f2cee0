"""Tensors of several sequences for one launch: where each lies, beside the first of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

#: Bytes that places are counted in, so that bodies know how wide they may load.
UNIT = 16


def places(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """How many units of 16 bytes each lies behind the first, int64, on their device; never waits."""
    first = tensors[0].data_ptr()
    return _offsets(tuple([(one.data_ptr() - first) // UNIT for one in tensors]), tensors[0].device)


# Windows of sequences stay where they are for as long as these live.
@functools.lru_cache(maxsize=1024)
def _offsets(offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return on_device(offsets, torch.int64, device)


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers, without waiting for it."""
    table = torch.tensor(numbers, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
