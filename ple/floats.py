"""Types that store value by value: their bytes as float32, exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.base import Bytes

Float32 = NDArray[np.float32]


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


def _float8_e5m2(rows: Bytes) -> Float32:
    """It is the upper half of a float16."""
    values: Float32 = (rows.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    return values


def _e4m3_values() -> Float32:
    """The values of the 256 codes: a sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, exponent - 10))
    magnitude[codes & 127 == 127] = np.nan
    values: Float32 = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return values


_E4M3 = _e4m3_values()

#: By name of the type: bytes uint8 [..., n] to their values, float32 [..., n / bytes of a value].
FLOATS: dict[str, Callable[[Bytes], Float32]] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "F8_E4M3": _float8_e4m3,
    "F8_E5M2": _float8_e5m2,
}
