"""What the bytes of a row mean: packed rows in, values out, on the CPU.

Types that store value by value are decoded here, quantised ones by the gguf package, which defines them. Rows of a type
that neither knows can still be read, as packed bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lazyio.errors import SettingError, TableError, Unsupported
from lazyio.fetchers.base import Bytes
from lazyio.ple.dtypes import TYPES

Float32 = NDArray[np.float32]

# Dequantising makes temporaries several times its result; this much at once keeps them in the processor's caches.
_BLOCKS_AT_ONCE = 4096


def decode(packed: Bytes, stored: str, dtype: DTypeLike = np.float32, *, scale: float | None = None) -> NDArray[Any]:
    """Values of packed rows: uint8 [..., row_bytes] to `dtype` [..., row_values], a new array.

    `stored` is the name of the rows' type (`TableSpec.dtype`), `dtype` float32 or float16. Given a `scale`, as fp8
    tables have one, value = stored value * scale. Arithmetic is in float32; what float16 can't hold becomes infinite.
    Raises TableError where a row is no whole number of blocks, Unsupported where there is no decoder for `stored`,
    SettingError for another `dtype`.
    """
    wanted = np.dtype(dtype)
    if wanted not in (np.float32, np.float16):
        raise SettingError(f"rows can be decoded to float32 or float16, not to {wanted}")
    if packed.dtype != np.uint8 or packed.ndim == 0:
        raise TableError(f"packed rows are uint8 [..., row_bytes]; got {packed.dtype} of shape {list(packed.shape)}")
    if stored not in TYPES:
        raise _no_decoder(stored)
    shape = (*packed.shape[:-1], TYPES[stored].row_values(packed.shape[-1]))
    rows = np.ascontiguousarray(packed)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _PLAIN[stored](rows) if stored in _PLAIN else _dequantised(rows, stored)
        if scale is not None:
            values = values * np.float32(scale)
        return values.reshape(shape).astype(wanted)


def _float32(rows: Bytes) -> Float32:
    return rows.view("<f4")


def _float16(rows: Bytes) -> Float32:
    return rows.view("<f2").astype(np.float32)


def _bfloat16(rows: Bytes) -> Float32:
    """A bfloat16 is the upper half of a float32."""
    values: Float32 = (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return values


def _float8_e4m3(rows: Bytes) -> Float32:
    return _E4M3[rows]


def _e4m3_values() -> Float32:
    """The values of the 256 codes: a sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, exponent - 10))
    magnitude[codes & 127 == 127] = np.nan
    values: Float32 = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return values


_E4M3 = _e4m3_values()

_PLAIN: dict[str, Callable[[Bytes], Float32]] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "F8_E4M3": _float8_e4m3,
}


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
