"""Products with quantised weights, which stay packed in memory: launchers of packed_matmul_bodies.py."""

from __future__ import annotations

from typing import Any

import torch

from lazyio.kernels.contract import bodies
from lazyio.kernels.packed import PackedWeight

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dequantise(weight: PackedWeight, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """All values of a weight, rounded to `dtype`: [..., outputs, inputs], contiguous, on the current stream."""
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    assert out.shape == weight.shape, "out has another shape than the weight"
    assert out.dtype == dtype, "out has another dtype than is asked for"
    assert out.is_contiguous(), "out is not contiguous"
    *experts, outputs, inputs = weight.shape
    grid = ((experts[0] if experts else 1) * -(-outputs // 8), -(-inputs // 512))
    rows, columns = weight.block or (1, 1)
    _bodies().expand[grid](
        *(*weight.pointers(), out),
        STORED=weight.stored,
        N=outputs,
        K=inputs,
        ROWS=rows,
        COLUMNS=columns,
        BLOCK_N=8,
        BLOCK_K=512,
    )
    return out


def _bodies() -> Any:
    return bodies("packed_matmul_bodies", "the kernels of packed weights")
