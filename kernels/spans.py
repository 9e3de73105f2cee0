"""Tables by which bodies find sequences: the blocks of their tokens, and where what they keep lies.

They are the same for all layers of a ubatch, and for all steps of a batch, so they are made and sent once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

#: What sequences keep lies at multiples of so many elements from each other.
EIGHT = 8


@functools.lru_cache(maxsize=256)
def blocks_of(spans: tuple[tuple[int, int], ...], rows: int, device: torch.device) -> torch.Tensor:
    """int32 [blocks, 4]: a block's first token; tokens from, to, of its sequence; which sequence that is.

    `spans` are the first token of each sequence and how many it has; blocks have at most `rows` tokens.
    """
    ends = [(start, start + length) for start, length in spans]
    table = [(at, start, stop, i) for i, (start, stop) in enumerate(ends) for at in range(start, stop, rows)]
    return _on(table, torch.int32, device)


def places_of(kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [sequences]: where each lies, in eights of elements from the first."""
    first, size = kept[0].data_ptr(), kept[0].element_size() * EIGHT
    return _places(tuple([(one.data_ptr() - first) // size for one in kept]), kept[0].device)


def check_kept(kept: Sequence[torch.Tensor], shape: tuple[int, int], like: torch.Tensor) -> None:
    """Assert that bodies can find these, each of this shape and contiguous, beside tensors like that."""
    first, size = kept[0].data_ptr(), like.element_size() * EIGHT
    for one in kept:
        assert one.shape == shape, f"what a sequence keeps is {list(shape)}"
        assert one.dtype == like.dtype, "what a sequence keeps is of another dtype"
        assert one.is_contiguous(), "what a sequence keeps is not contiguous"
        assert one.device == like.device, "tensors are on different devices"
        assert (one.data_ptr() - first) % size == 0, f"sequences keep at multiples of {EIGHT} elements from each other"


@functools.lru_cache(maxsize=1024)
def _places(offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return _on(offsets, torch.int64, device)


def _on(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    table = torch.tensor(numbers, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
