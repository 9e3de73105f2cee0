"""Rows of EXL3's n-gram tables: a scale, and 160 values that share their bits in a ring.

A row of the type EXL3_K<K> is 1 + 10 K little-endian words of 16 bits. The first is the row's scale, a float16. The
others are a ring of 160 codes of K bits, the lowest bits of a word first. A value is chosen by its own code and those
before it, beyond the first of the ring those at its end: with c_j the code at place j modulo 160,

    state_i = (c_i + c_{i-1} 2**K + c_{i-2} 2**2K + ...) mod 2**16
    b_i     = sum of the 4 bytes of state_i * 0x83DCD12D mod 2**32
    code_i  = (1024 + b_i) * 0x1EEE + 0xC931          the constants being bits of float16
    value_i = code_i * scale

and to that a table adds the bias of the n-gram head that the row belongs to. Source: `ngram_codec.py` of exllamav3,
whose codebook is named mul1.

Precision: 1024 + b and both constants are exact in float32, and so are their product and the sum; `code` is that sum
rounded to float16, once. code * scale, two float16, is exact in float32; adding the bias rounds to float32.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.base import Bytes
from lazyio.ple.floats import FLOATS, Float32

ROW_VALUES = 160

_STATE_BITS = 16
# Temporaries of this many rows stay in the processor's caches.
_ROWS_AT_ONCE = 1024


def decode_exl3(rows: Bytes, stored: str) -> Float32:
    """Values, float32 [n, 160] and without a bias, of rows uint8 [n, row_bytes] of the type `stored`, "EXL3_K<K>"."""
    bits = int(stored.removeprefix("EXL3_K"))
    values = np.empty((len(rows), ROW_VALUES), np.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        states = _states(rows[part, 2:], bits)
        scales = FLOATS["F16"](np.ascontiguousarray(rows[part, :2]))
        np.multiply(_codebook()[states], scales, out=values[part])
    return values


def _states(rings: Bytes, bits: int) -> NDArray[np.uint16]:
    """The state of each value: rings uint8 [n, 20 * bits] to uint16 [n, 160]."""
    codes = _codes(rings, bits)
    states = codes.copy()
    for back in range(1, -(-_STATE_BITS // bits)):
        # Bits beyond the 16th fall off.
        states |= np.roll(codes, back, axis=1) << np.uint16(back * bits)
    return states


def _codes(rings: Bytes, bits: int) -> NDArray[np.uint16]:
    """Codes of up to 8 bits, each within two neighbouring bytes."""
    first_bit = np.arange(ROW_VALUES) * bits
    byte, shift = first_bit // 8, (first_bit % 8).astype(np.uint16)
    # A last code that ends with its byte has none after it, and needs none.
    following = np.minimum(byte + 1, rings.shape[1] - 1)
    pairs = rings[:, byte] | rings[:, following].astype(np.uint16) << np.uint16(8)
    return pairs >> shift & np.uint16((1 << bits) - 1)


@functools.cache
def _codebook() -> Float32:
    """The code of each of the 65,536 states."""
    hashed = np.arange(1 << _STATE_BITS, dtype=np.uint32) * np.uint32(0x83DCD12D)
    sums = hashed.astype("<u4").view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.uint32)
    factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float32)
    exact = (sums + np.uint32(1024)).astype(np.float32) * factor + offset
    codes: Float32 = exact.astype(np.float16).astype(np.float32)
    return codes
