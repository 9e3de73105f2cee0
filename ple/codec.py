"""What the bytes of a row mean: packed rows in, values out, on the CPU.

Types that store value by value, EXL3's and MLX's are decoded by this package, those of GGUF by the gguf package, which
defines them. Rows of a type that neither knows can still be read, as packed bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lazyio.errors import SettingError, TableError, Unsupported
from lazyio.fetchers.base import Bytes
from lazyio.ple.dtypes import EXL3_TYPES, MLX_TYPES, TYPES
from lazyio.ple.exl3 import decode_exl3
from lazyio.ple.floats import FLOATS, Float32
from lazyio.ple.mlx import decode_mlx

# Dequantising makes temporaries several times its result; this much at once keeps them in the processor's caches.
_BLOCKS_AT_ONCE = 4096


def decode(
    packed: Bytes,
    stored: str,
    dtype: DTypeLike = np.float32,
    *,
    scale: float | None = None,
    bias: Float32 | None = None,
) -> NDArray[Any]:
    """Values of packed rows: uint8 [..., row_bytes] to `dtype` [..., row_values], a new array.

    `stored` is the name of the rows' type (`TableSpec.dtype`), `dtype` float32 or float16. Given a `scale`, as fp8
    tables have one, value = stored value * scale; given a `bias`, float32 [..., row_values], as EXL3 tables have one
    for each n-gram head, it is added to that. Arithmetic is in float32, each step rounded to it, and the result is
    rounded to float16 where that is asked for; what float16 can't hold becomes infinite.
    Raises TableError where a row is no whole number of blocks, Unsupported where there is no decoder for `stored`,
    SettingError for another `dtype`.
    """
    wanted = np.dtype(dtype)
    if wanted not in (np.float32, np.float16):
        raise SettingError(f"rows can be decoded to float32 or float16, not to {wanted}")
    if packed.dtype != np.uint8 or packed.ndim == 0 or packed.shape[-1] == 0:
        raise TableError(f"packed rows are uint8 [..., row_bytes]; got {packed.dtype} of shape {list(packed.shape)}")
    if stored not in TYPES:
        raise _no_decoder(stored)
    shape = (*packed.shape[:-1], TYPES[stored].row_values(packed.shape[-1]))
    rows = np.ascontiguousarray(packed)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _values(rows.reshape(math.prod(shape[:-1]), rows.shape[-1]), stored).reshape(shape)
        if scale is not None:
            values = values * np.float32(scale)
        if bias is not None:
            values = values + bias
        return values.astype(wanted)


def _values(rows: Bytes, stored: str) -> Float32:
    """Values of rows [n, row_bytes], in order and in any shape."""
    if stored in FLOATS:
        return FLOATS[stored](rows)
    if stored in EXL3_TYPES:
        return decode_exl3(rows, stored)
    if stored in MLX_TYPES:
        return decode_mlx(rows, stored)
    return _dequantised(rows, stored)


def _dequantised(rows: Bytes, stored: str) -> Float32:
    """Values of all rows in one dimension."""
    # Slow to import, and tables of plain types never need it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = getattr(GGMLQuantizationType, stored, None)
    if kind is None:
        raise _no_decoder(stored)
    block = TYPES[stored]
    # Blocks stand alone, so rows can be taken for a few long ones, which spares the package's loop over groups of rows.
    flat = rows.reshape(-1)
    values = np.empty(flat.size // block.block_bytes * block.block_values, np.float32)
    step_bytes, step_values = _BLOCKS_AT_ONCE * block.block_bytes, _BLOCKS_AT_ONCE * block.block_values
    try:
        for number in range(-(-flat.size // step_bytes)):
            part = flat[number * step_bytes : (number + 1) * step_bytes]
            values[number * step_values : (number + 1) * step_values] = dequantize(part, kind)
    except NotImplementedError as error:
        raise _no_decoder(stored) from error
    return values


def _no_decoder(stored: str) -> Unsupported:
    return Unsupported(f"there is no decoder for rows of type {stored}; they can be had packed, as stored")
