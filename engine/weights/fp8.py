"""fp8 weights: values of 8 bits, and one scale for all of them, for each row, or for each block.

    value = stored value * scale of its block

in float32. Source: `Fp8Dequantize` of transformers (`weight_scale_inv` is a factor there too, whatever its name says),
and the float-quantized format of compressed-tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from lazyio.engine.weights.source import BlockScale
from lazyio.errors import ModelError
from lazyio.ple.checkpoint import StoredTensor, read_tensor
from lazyio.ple.codec import decode

#: Types of stored fp8 weights, by name, as torch has them.
FP8_TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}

_SCALE_TYPES = ("F32", "BF16", "F16")


def block_scale(weight: StoredTensor, scale: StoredTensor, block: tuple[int, int]) -> BlockScale:
    """The scale of fp8 weights [..., rows, columns], whose shape tells what each of its values is for.

    `block` has the rows and columns of blocks where it is blocks. Raises ModelError for a scale of any other shape, and
    for weights of other types, whose scales would mean something else.
    """
    if weight.dtype not in FP8_TYPES:
        raise ModelError(
            f"{weight.path}: {weight.name} is {weight.dtype} and has {scale.name}; only fp8 is scaled here"
        )
    if len(weight.shape) >= 2 and scale.dtype in _SCALE_TYPES:
        rows, columns = weight.shape[-2:]
        for size in (block, (1, columns), (rows, columns)):
            if _without_ones(scale.shape) == _without_ones(_blocks(weight.shape, size)):
                return BlockScale(scale, size)
    raise ModelError(
        f"{scale.path}: {scale.name} is {scale.dtype} {list(scale.shape)}, which can't scale {weight.name} "
        f"{list(weight.shape)}: there must be one for all values, for each row or for each block of {list(block)}"
    )


def read_scale(weight: StoredTensor, scale: BlockScale, device: torch.device) -> torch.Tensor:
    """The scales, float32 [..., blocks of rows, blocks of columns]."""
    packed = np.frombuffer(read_tensor(scale.stored), np.uint8)
    return torch.from_numpy(decode(packed, scale.stored.dtype).reshape(_blocks(weight.shape, scale.block))).to(device)


def scaled(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], box: Sequence[slice]) -> torch.Tensor:
    """Scale a box of fp8 weights, a slice for each dimension: float32."""
    *leading, rows, columns = box
    part = scales[tuple(leading)]
    for dimension, cut, size in ((-2, rows, block[0]), (-1, columns, block[1])):
        number = torch.arange(cut.start, cut.stop, device=scales.device) // size
        part = part.index_select(dimension, number)
    return values.float() * part


def _blocks(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    *leading, rows, columns = shape
    return (*leading, math.ceil(rows / block[0]), math.ceil(columns / block[1]))


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
