"""Rows of MLX's quantised tables: groups of small whole numbers, each group with a scale and a bias.

MLX keeps them in three tensors: `weight` U32 [rows, words], whose words hold 32 / bits values each, the lowest bits
first, and `scales` and `biases` [rows, groups]. A row is in three places then. `tools/interleave.py` brings it
together: the words of a row, then its scales, then its biases, which is the type MLX_Q<bits>_G<values of a group>.

    value = number * scale + bias

Source: `quantize` of MLX, mode "affine". A number has at most 8 bits and a scale 11 that count, so their product is
exact in float32, and adding the bias rounds to float32 once. MLX itself rounds to the type of the scales.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from lazyio.errors import TableError
from lazyio.fetchers.base import Bytes
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.dtypes import MLX_TYPES
from lazyio.ple.floats import FLOATS, Float32

#: What MLX takes where nothing is said, of the tables that are known.
USUAL_GROUP = 32

_NAME = re.compile(r"MLX_Q(?P<bits>\d)_G(?P<group>\d+)(?P<f16>_F16)?")
# Temporaries of this many bytes of rows stay in the processor's caches.
_BYTES_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class MlxType:
    """How a quantised row is stored."""

    bits: int  # of a value
    group: int  # values that share a scale and a bias
    scales: str  # type of scales and biases: BF16 or F16

    @classmethod
    def named(cls, name: str) -> Self:
        """The type of that name, one of `MLX_TYPES`."""
        parts = _NAME.fullmatch(name)
        assert parts is not None
        return cls(int(parts["bits"]), int(parts["group"]), "F16" if parts["f16"] else "BF16")

    @property
    def name(self) -> str:
        """The name it has in `MLX_TYPES`, if it is one of them."""
        return f"MLX_Q{self.bits}_G{self.group}" + ("_F16" if self.scales == "F16" else "")


def mlx_type_of(weight: StoredTensor, scales: StoredTensor, biases: StoredTensor, group: int = USUAL_GROUP) -> MlxType:
    """The type of rows in these three tensors, for groups of so many values.

    The bits of a value follow from the shapes, but for the size of a group. Raises TableError for shapes and types that
    don't fit each other, and for what no type is known of.
    """
    shown = ", ".join(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in (weight, scales, biases))
    if (
        weight.dtype != "U32"
        or scales.dtype not in ("BF16", "F16")
        or (biases.dtype, biases.shape) != (scales.dtype, scales.shape)
        or len(weight.shape) != 2
        or len(scales.shape) != 2
        or weight.shape[0] != scales.shape[0]
        or 0 in (*weight.shape, *scales.shape)
    ):
        raise TableError(
            f"{weight.path}: {shown} are no quantised rows: weight must be U32 [rows, words], scales and biases both "
            "BF16 or both F16 and [rows, groups]"
        )
    bits, rest = divmod(32 * weight.shape[1], scales.shape[1] * group)
    found = MlxType(bits, group, scales.dtype)
    if rest or found.name not in MLX_TYPES:
        raise TableError(
            f"{weight.path}: {shown} would have {32 * weight.shape[1] / (scales.shape[1] * group):g} bits a value in "
            f"groups of {group}; 2, 4 or 8 in groups of 32, 64 or 128 can be read; if groups have another size, say so"
        )
    return found


def decode_mlx(rows: Bytes, stored: str) -> Float32:
    """Values, float32 [n, row_values], of rows uint8 [n, row_bytes] of the type `stored`, one of `MLX_TYPES`."""
    kind = MlxType.named(stored)
    groups = rows.shape[1] // MLX_TYPES[stored].block_bytes
    scales_at = rows.shape[1] - 4 * groups
    values = np.empty((len(rows), groups, kind.group), np.float32)
    step = max(1, _BYTES_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        floats = FLOATS[kind.scales](np.ascontiguousarray(part[:, scales_at:])).reshape(len(part), 2, groups, 1)
        numbers = _numbers(part[:, :scales_at], kind.bits).reshape(len(part), groups, kind.group)
        values[start : start + step] = numbers * floats[:, 0] + floats[:, 1]
    return values.reshape(len(rows), groups * kind.group)


def _numbers(words: Bytes, bits: int) -> Bytes:
    """The numbers in the words of rows, uint8 [n, bytes] to [n, bytes, 8 / bits]: words are little-endian in files."""
    numbers = np.empty((*words.shape, 8 // bits), np.uint8)
    for place in range(8 // bits):
        numbers[:, :, place] = words >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    return numbers
