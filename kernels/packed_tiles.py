"""Tiles of quantised weights on a GPU, as values: `load_tile`, for the bodies of all kernels that multiply by weights.

    w = load_tile(p0, p1, p2, p3, expert, n, k, STORED, N, K, BLOCK_K, ROWS, COLUMNS)

is float32 [BLOCK_N, BLOCK_K]: rows n of the weight of `expert`, inputs k to k + BLOCK_K, in their order. Each value is
exact, the bits of `packed.reference_dequantise`; round it to the dtype of what it is multiplied with.

* p0 to p3 are `PackedWeight.pointers()`, of the whole weight, whichever expert is taken.
* expert is an integer, or one for each of the rows, and 0 for a weight without experts; n [BLOCK_N] are rows, all below
  N: clamp them, and drop what they are multiplied to. k is a multiple of BLOCK_K. What lies beyond K is 0 (or -0).
* STORED is the stored type's name; N and K are `shape[-2:]`; ROWS and COLUMNS the `block` of fp8, and else (1, 1).
* BLOCK_K is a power of two, 32 at least.

Codes are made floats by putting them into a mantissa, since GPUs convert integers at a fraction of their speed.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def load_tile(
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """See above."""
    row = n.to(tl.int64) + tl.cast(expert, tl.int64) * N
    if STORED == "F8_E4M3":
        blocks: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
        scale_row = (n // ROWS).to(tl.int64) + tl.cast(expert, tl.int64) * ((N + ROWS - 1) // ROWS)
        values = _fp8(p0, p2, row, scale_row, k, K, BLOCK_K, COLUMNS, blocks)
    elif STORED == "Q8_0":
        values = _bytes(p0, p2, row, k, K, BLOCK_K)
    else:
        group: tl.constexpr = 16 if STORED == "Q6_K" else 32
        values = _nibbles(p0, p1, p2, p3, row, k, STORED, K, BLOCK_K, group)
    return values


@triton.jit
def _fp8(
    p0: tl.tensor,
    p2: tl.tensor,
    row: tl.tensor,
    scale_row: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a row of scales
) -> tl.tensor:
    column = k + tl.arange(0, BLOCK_K)
    place = p0 + row[:, None] * K + column[None, :]
    scales = p2 + scale_row[:, None] * BLOCKS + (column // COLUMNS)[None, :]
    if K % BLOCK_K:
        live = (column < K)[None, :] & (row >= 0)[:, None]
        codes, scale = tl.load(place, mask=live, other=0), tl.load(scales, mask=live, other=0.0)
    else:
        codes, scale = tl.load(place), tl.load(scales)
    # Exponent and mantissa, put where a float16 has them, give 1/256 of the value.
    wide = codes.to(tl.uint16)
    small = ((wide & 128) << 8 | (wide & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where((wide & 127) == 127, float("nan"), small * 256) * scale


@triton.jit
def _bytes(
    p0: tl.tensor, p2: tl.tensor, row: tl.tensor, k: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    groups: tl.constexpr = BLOCK_K // 32
    scale = _scales(p2, row, k, K, BLOCK_K, 32, 32).to(tl.float32)
    codes = _codes(p0, row, k, K, BLOCK_K, 32, 32)
    # The sign bit turned over is code + 128, below 256.
    above = (codes.to(tl.uint8, bitcast=True) ^ 128).to(tl.uint32)
    values = ((above | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0) * scale[:, :, None]
    return tl.reshape(values, (row.shape[0], groups * 32))


@triton.jit
def _nibbles(
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    row: tl.tensor,
    k: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # values that share a scale
) -> tl.tensor:
    codes = _codes(p0, row, k, K, BLOCK_K, GROUP, GROUP // 2).to(tl.uint32)
    even, odd = codes & 15, codes >> 4
    number = 2 * tl.arange(0, GROUP // 2)[None, None, :]
    if STORED == "Q5_0" or STORED == "Q5_1" or STORED == "Q5_K":
        high = _scales(p1, row, k, K, BLOCK_K, 32, 32).to(tl.uint32, bitcast=True)[:, :, None]
        even |= (high >> number & 1) << 4
        odd |= (high >> number + 1 & 1) << 4
    elif STORED == "Q6_K":
        high = _scales(p1, row, k, K, BLOCK_K, 16, 16).to(tl.uint32, bitcast=True)[:, :, None]
        even |= (high >> 2 * number & 3) << 4
        odd |= (high >> 2 * number + 2 & 3) << 4
    scales = _scales(p2, row, k, K, BLOCK_K, GROUP, GROUP)
    units = scales
    if STORED == "Q4_K" or STORED == "Q5_K" or STORED == "Q6_K":
        units = _scales(p3, row, k, K, BLOCK_K, GROUP, 256)
    values = tl.join(_values(even, scales, units, STORED), _values(odd, scales, units, STORED))
    return tl.reshape(values, (row.shape[0], BLOCK_K))


@triton.jit
def _codes(
    p0: tl.tensor,
    row: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BYTES: tl.constexpr,  # of a group
) -> tl.tensor:
    """[BLOCK_N, groups, BYTES]."""
    group = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
    place = (row * (K // GROUP * BYTES))[:, None, None] + (group * BYTES)[None, :, None]
    place += tl.arange(0, BYTES)[None, None, :]
    if K % BLOCK_K:
        return tl.load(p0 + place, mask=(group < K // GROUP)[None, :, None], other=0)
    else:
        return tl.load(p0 + place)


@triton.jit
def _scales(
    plane: tl.tensor,
    row: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,  # values that an element of the plane is for
) -> tl.tensor:
    """[BLOCK_N, groups]: what a plane has for each group."""
    group = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
    place = plane + (row * (K // EACH))[:, None] + (group // (EACH // GROUP))[None, :]
    if K % BLOCK_K:
        return tl.load(place, mask=(group < K // GROUP)[None, :], other=0)
    else:
        return tl.load(place)


@triton.jit
def _values(code: tl.tensor, scales: tl.tensor, units: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    """Of codes uint32 [BLOCK_N, groups, n], with the elements [BLOCK_N, groups] of the planes of scales and units."""
    if STORED == "Q4_0":
        return _over_16(code) * (scales.to(tl.float32) * 16)[:, :, None] - (scales.to(tl.float32) * 24)[:, :, None]
    elif STORED == "IQ4_NL":
        return _iq4_value(code) * scales.to(tl.float32)[:, :, None]
    elif STORED == "Q5_0":
        return _over_32(code) * (scales.to(tl.float32) * 32)[:, :, None] - (scales.to(tl.float32) * 48)[:, :, None]
    elif STORED == "Q4_1" or STORED == "Q5_1":
        return _whole(code, 0) * _low_half(scales)[:, :, None] + _high_half(scales)[:, :, None]
    elif STORED == "Q6_K":
        return _whole(code, 32) * (units.to(tl.float32) * scales.to(tl.float32))[:, :, None]
    else:
        tl.static_assert(STORED == "Q4_K" or STORED == "Q5_K")
        scale = _low_half(units) * (scales & 255).to(tl.float32)
        least = _high_half(units) * (scales >> 8).to(tl.float32)
        return _whole(code, 0) * scale[:, :, None] - least[:, :, None]


@triton.jit
def _whole(code: tl.tensor, ZERO: tl.constexpr) -> tl.tensor:
    """code - ZERO."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _over_16(code: tl.tensor) -> tl.tensor:
    """1 + code / 16. Times 16 scales, less 24 scales, is (code - 8) scales, exactly and in one step."""
    return (code << 19 | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _over_32(code: tl.tensor) -> tl.tensor:
    return (code << 18 | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _iq4_value(code: tl.tensor) -> tl.tensor:
    """-127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, by code: the nearest integers to a polynomial."""
    x = _whole(code, 0)
    near = (((1.586043e-3 * x + 3.108644e-2) * x - 1.371927) * x + 24.17383) * x - 126.567
    return (near + 12582912.0) - 12582912.0


@triton.jit
def _low_half(word: tl.tensor) -> tl.tensor:
    """The float16 in the lower half of a word."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(word: tl.tensor) -> tl.tensor:
    return (word >> 16 & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
