"""Multiplying by weights that stay packed, and taking rows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from lazyio.kernels.contract import usable
from lazyio.kernels.packed import PackedWeight, reference_dequantise
from lazyio.kernels.packed_matmul import dequantise, matmul

#: A matrix as a layer holds it: [outputs, inputs], or [experts, outputs, inputs].
Weight = torch.Tensor | PackedWeight

# Without a kernel, so many values are there at a time.
_VALUES_AT_ONCE = 1 << 22
_ROWS_TOGETHER = 8


def times(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x W^T of x [..., inputs] and a weight [outputs, inputs]: [..., outputs], in x's dtype."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight)
    if usable(x.device):
        if x.ndim == 2:
            return matmul(x.contiguous(), weight)
        return matmul(x.reshape(-1, x.shape[-1]).contiguous(), weight).view(*x.shape[:-1], weight.shape[0])
    outputs, inputs = weight.shape
    step = max(1, _VALUES_AT_ONCE // inputs)
    if weight.block is not None and weight.block[0] < outputs:  # no piece begins within a block
        step = max(1, step // weight.block[0]) * weight.block[0]
    pieces = [cut(weight, [slice(start, min(start + step, outputs))]) for start in range(0, outputs, step)]
    return torch.cat([functional.linear(x, reference_dequantise(piece).to(x.dtype)) for piece in pieces], -1)


def joined(weights: Sequence[Weight]) -> list[tuple[Weight, list[int]]]:
    """Weights [outputs, inputs] of the same inputs, those that lie behind one another as one, in the same memory.

    Each with the outputs of all that it has, in order.
    """
    runs: list[tuple[Weight, list[int]]] = []
    for weight in weights:
        both = _both(runs[-1][0], weight) if runs else None
        if both is None:
            runs.append((weight, [weight.shape[0]]))
        else:
            runs[-1] = both, [*runs[-1][1], weight.shape[0]]
    return runs


def _both(first: Weight, second: Weight) -> PackedWeight | None:
    """Two weights as one, if both are packed and the second begins where the first ends."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return None
    if (first.stored, first.block, first.shape[1:]) != (second.stored, second.block, second.shape[1:]):
        return None
    if first.block is not None and first.shape[0] % first.block[0]:
        return None
    if not all(map(_is_behind, second.planes, first.planes)):
        return None
    rows = first.shape[0] + second.shape[0]
    of_both = zip(first.planes, second.planes, strict=True)
    planes = tuple(a.as_strided((len(a) + len(b), a.shape[1]), a.stride(), a.storage_offset()) for a, b in of_both)
    return replace(first, shape=(rows, *first.shape[1:]), planes=planes)


def _is_behind(plane: torch.Tensor, before: torch.Tensor) -> bool:
    shared = plane.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    whole = plane.is_contiguous() and before.is_contiguous()
    return shared and whole and plane.storage_offset() == before.storage_offset() + before.numel()


def rows_of(weight: PackedWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a weight [outputs, inputs] that are asked for, int64 [n]: values, [n, inputs]."""
    inputs = weight.shape[1]
    if not usable(rows.device):
        return reference_dequantise(_taken(weight, rows, [len(rows)])).to(dtype)
    # As experts of a few rows each, since a kernel is compiled anew for another number of rows, but not of experts.
    padded = functional.pad(rows, (0, -len(rows) % _ROWS_TOGETHER))
    together = [len(padded) // _ROWS_TOGETHER, _ROWS_TOGETHER]
    values = dequantise(_taken(weight, padded, together), dtype)
    return values.view(-1, inputs)[: len(rows)]


def _taken(weight: PackedWeight, rows: torch.Tensor, shape: Sequence[int]) -> PackedWeight:
    """Rows of a weight, in the shape [*shape, inputs]."""
    block = weight.block
    each = [1 if block is None or place == 0 else block[0] for place in range(len(weight.planes))]
    planes = (plane[rows // size if size > 1 else rows] for plane, size in zip(weight.planes, each, strict=True))
    return replace(
        weight,
        shape=(*shape, weight.shape[1]),
        planes=tuple(plane.view(*shape, plane.shape[-1]) for plane in planes),
        block=None if block is None else (1, block[1]),
    )


def cut(weight: PackedWeight, box: Sequence[slice]) -> PackedWeight:
    """A part of a weight, in the same memory: a slice for each of the leading dimensions that are not taken whole.

    Of fp8, rows are to begin where a block of scales does, or to lie in one; else the part is good for its codes alone.
    """
    shape = tuple(len(range(*one.indices(size))) for one, size in zip(box, weight.shape, strict=False))
    planes = [plane[tuple(box)] for plane in weight.planes]
    if weight.block is not None and len(box) == len(weight.shape) - 1:
        start, stop, _ = box[-1].indices(weight.shape[-2])
        rows = slice(start // weight.block[0], math.ceil(stop / weight.block[0]))
        planes[1] = weight.planes[1][(*box[:-1], rows)]
    return replace(weight, shape=shape + weight.shape[len(box) :], planes=tuple(planes))
