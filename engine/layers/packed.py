"""Multiplying by weights that stay packed, and taking rows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from lazyio.kernels.contract import usable
from lazyio.kernels.packed import PackedWeight, reference_dequantise
from lazyio.kernels.packed_matmul import dequantise

#: A matrix as a layer holds it: [outputs, inputs], or [experts, outputs, inputs].
Weight = torch.Tensor | PackedWeight

# Without a kernel, so many values are there at a time.
_VALUES_AT_ONCE = 1 << 22


def times(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x W^T of x [..., inputs] and a weight [outputs, inputs]: [..., outputs], in x's dtype."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight)
    if usable(x.device):
        return functional.linear(x, dequantise(weight, x.dtype))
    outputs, inputs = weight.shape
    step = max(1, _VALUES_AT_ONCE // inputs)
    pieces = [cut(weight, [slice(start, min(start + step, outputs))]) for start in range(0, outputs, step)]
    return torch.cat([functional.linear(x, reference_dequantise(piece).to(x.dtype)) for piece in pieces], -1)


def rows_of(weight: PackedWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a weight [outputs, inputs] that are asked for, int64 [n]: values, [n, inputs]."""
    block = None if weight.block is None else (1, weight.block[1])
    each = [1 if weight.block is None or place == 0 else weight.block[0] for place in range(len(weight.planes))]
    planes = [plane[rows // size if size > 1 else rows] for plane, size in zip(weight.planes, each, strict=True)]
    taken = replace(weight, shape=(len(rows), weight.shape[1]), planes=tuple(planes), block=block)
    if usable(rows.device):
        return dequantise(taken, dtype)
    return reference_dequantise(taken).to(dtype)


def cut(weight: PackedWeight, box: Sequence[slice]) -> PackedWeight:
    """A part of a weight, in the same memory: a slice for each of the leading dimensions that are not taken whole.

    Of fp8, rows are to begin where a block of scales does; else the part is good for its codes alone.
    """
    shape = tuple(len(range(*one.indices(size))) for one, size in zip(box, weight.shape, strict=False))
    planes = [plane[tuple(box)] for plane in weight.planes]
    if weight.block is not None and len(box) == len(weight.shape) - 1:
        start, stop, _ = box[-1].indices(weight.shape[-2])
        rows = slice(start // weight.block[0], math.ceil(stop / weight.block[0]))
        planes[1] = weight.planes[1][(*box[:-1], rows)]
    return replace(weight, shape=shape + weight.shape[len(box) :], planes=tuple(planes))
