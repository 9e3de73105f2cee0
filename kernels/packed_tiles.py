"""Quantised weights in the bodies of kernels: `load_tile` gives values.

    w = load_tile(p0, p1, p2, p3, expert, n, k, STORED, N, K, BLOCK_K, ROWS, COLUMNS)

is float32 [BLOCK_N, BLOCK_K]: rows n of the weight of `expert`, inputs k to k + BLOCK_K, in their order. Each value is
exact, the bits of `packed.reference_dequantise`; round it to the dtype of what it is multiplied with.

* p0 to p3 are `PackedWeight.pointers()`, of the whole weight, whichever expert is taken.
* expert is an integer, or one for each of the rows, and 0 for a weight without experts; n [BLOCK_N] are rows, all below
  N: clamp them, and drop what they are multiplied to. k is a multiple of BLOCK_K. What lies beyond K is 0 (or -0).
* STORED is the stored type's name; N and K are `shape[-2:]`; ROWS and COLUMNS the `block` of fp8, and else (1, 1).
* BLOCK_K is a power of two, 32 at least; 64 and more are faster.

Products with few rows are better made by packed_products.py. Codes are made floats by putting them into a mantissa:
GPUs convert integers at a fraction of their speed.
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
    of_scales = scale_rows(expert, n, STORED, N, ROWS)
    values = _values(p0, p1, p2, p3, row, of_scales, k, STORED, K, BLOCK_K, COLUMNS)
    if STORED == "F8_E4M3" and COLUMNS % 32 != 0 and COLUMNS < K:
        column = (k + tl.arange(0, BLOCK_K))[None, :]
        place = p2 + (of_scales[:, None] * ((K + COLUMNS - 1) // COLUMNS) + column // COLUMNS)
        values = values * load(place, column < K, K % BLOCK_K != 0)
    return values


@triton.jit
def scale_rows(expert: tl.tensor, n: tl.tensor, STORED: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """The rows of scales that rows of codes have."""
    if STORED == "F8_E4M3":
        return (n // ROWS).to(tl.int64) + tl.cast(expert, tl.int64) * ((N + ROWS - 1) // ROWS)
    else:
        return n.to(tl.int64) + tl.cast(expert, tl.int64) * N


@triton.jit
def load(place: tl.tensor, live: tl.tensor, CHECKED: tl.constexpr) -> tl.tensor:
    """What is there, and 0 for what is not `live`, if that has to be looked at."""
    if CHECKED:
        return tl.load(place, mask=live, other=0)
    else:
        return tl.load(place)


@triton.jit
def _values(
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    row: tl.tensor,
    of_scales: tl.tensor,
    k: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_N, BLOCK_K], but for scales that are not those of whole groups of 32."""
    checked: tl.constexpr = K % BLOCK_K != 0
    rows, first = row[:, None, None], (k // 64 + tl.arange(0, (BLOCK_K + 63) // 64))[None, :, None]
    half = k // 32 % 2 if BLOCK_K == 32 else 0
    words, high = words_of(p0, p1, rows, first, half, STORED, K, checked)
    loaded, units = loaded_scales(p2, p3, of_scales[:, None, None], first, STORED, K, COLUMNS, checked)
    s0, s1, s2, s3, more0, more1 = scales_of(loaded, units, STORED)
    if BLOCK_K == 32:
        if STORED != "Q8_0" and STORED != "F8_E4M3":
            words = words >> tl.cast(8 * half, tl.uint32)
            high = high >> tl.cast((4 if STORED == "Q6_K" else 2) * half, tl.uint32)
        s0, s1, more0 = tl.where(half == 0, s0, s2), tl.where(half == 0, s1, s3), tl.where(half == 0, more0, more1)
        v0, v1 = _quarter(words, high, s0, more0, 0, STORED), _quarter(words, high, s1, more0, 1, STORED)
        return tl.reshape(tl.permute(tl.join(v0, v1), (0, 1, 4, 2, 3)), (row.shape[0], BLOCK_K))
    elif STORED == "Q4_0":
        v0, v1, v2, v3 = _q4_0(words, s0, s2)
        all_four = tl.join(tl.join(v0, v2), tl.join(v1, v3))
        return tl.reshape(tl.permute(all_four, (0, 1, 4, 5, 2, 3)), (row.shape[0], BLOCK_K))
    else:
        v0, v1 = _quarter(words, high, s0, more0, 0, STORED), _quarter(words, high, s1, more0, 1, STORED)
        if STORED == "Q8_0" or STORED == "F8_E4M3":
            words, high = words_of(p0, p1, rows, first, 1, STORED, K, checked)
        v2, v3 = _quarter(words, high, s2, more1, 2, STORED), _quarter(words, high, s3, more1, 3, STORED)
        all_four = tl.join(tl.join(v0, v2), tl.join(v1, v3))  # [BLOCK_N, groups of 64, words, halves, 2, 2]
        return tl.reshape(tl.permute(all_four, (0, 1, 4, 5, 2, 3)), (row.shape[0], BLOCK_K))


@triton.jit
def words_of(
    p0: tl.tensor,
    p1: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,  # of 64
    half: tl.tensor,  # which 32 of them, of codes of 8 bits
    STORED: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tensor:
    """Words of codes, and of high bits: those for the lower half and the upper half of a code's word in its halves.

    row and group have three dimensions, of which the words become the last.
    """
    groups: tl.constexpr = (K + 63) // 64
    each: tl.constexpr = 16 if STORED == "Q8_0" or STORED == "F8_E4M3" else 8
    place = row * (groups * each) + group * each + tl.arange(0, 8)[None, None, :]
    if STORED == "Q8_0" or STORED == "F8_E4M3":
        place += half * 8
    words = load(p0 + place, group < groups, CHECKED).to(tl.uint32, bitcast=True)
    high = words
    if STORED == "Q5_0" or STORED == "Q5_1" or STORED == "Q5_K":
        # Of two words at once: bytes would have products arranged in a way that those with sums don't share.
        two_places = p1 + (row * (groups * 4) + group * 4 + tl.arange(0, 4)[None, None, :])
        two = load(two_places, group < groups, CHECKED).to(tl.uint16, bitcast=True).to(tl.uint32)
        narrow = tl.reshape(tl.join(two & 255, two >> 8), words.shape)
        high = (narrow | narrow << 12) & 0x000F000F
    elif STORED == "Q6_K":
        narrow = load(p1 + place, group < groups, CHECKED).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = (narrow | narrow << 8) & 0x00FF00FF
    return words, high


@triton.jit
def pairs_of(words: tl.tensor, high: tl.tensor, P: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """Whole codes of one place, in both halves of a word."""
    codes = words >> 4 * P & 0x000F000F
    if STORED == "Q8_0" or STORED == "F8_E4M3":
        codes = words >> 8 * (P % 2) & 0x00FF00FF
    elif STORED == "Q5_0" or STORED == "Q5_1" or STORED == "Q5_K":
        codes |= (high << 4 >> P) & 0x00100010
    elif STORED == "Q6_K":
        codes |= (high << 4 >> 2 * P) & 0x00300030
    return codes


@triton.jit
def loaded_scales(
    p2: tl.tensor,
    p3: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tensor:
    """What the planes have for groups of 64 values: 2 or 4 scales each, and the unit, if there is one.

    row and first have three dimensions, of which the results have the first two.
    """
    each: tl.constexpr = 4 if STORED == "Q6_K" else 2
    group = first * each + tl.arange(0, each)[None, None, :]
    if STORED == "F8_E4M3":
        place = row * ((K + COLUMNS - 1) // COLUMNS) + group * 32 // COLUMNS
        if COLUMNS % 32 != 0 and COLUMNS < K:
            scales = tl.full(place.shape, 1.0, tl.float32)
        else:
            scales = load(p2 + place, group * 32 < K, CHECKED)
    else:
        scales = load(p2 + (row * (K // (64 // each)) + group), group < K // (64 // each), CHECKED)
    if STORED == "Q4_K" or STORED == "Q5_K" or STORED == "Q6_K":
        units = load(p3 + (row * (K // 256) + first // 4), first < K // 64, CHECKED)
        return scales, tl.reshape(units, (units.shape[0], units.shape[1]))
    else:
        return scales, scales


@triton.jit
def scales_of(loaded: tl.tensor, units: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    """Of groups of 64 values: the scale of each 16, and what is added to the first and to the second 32."""
    if STORED == "Q6_K":
        unit = units.to(tl.float32)
        even, odd = tl.split(tl.reshape(loaded, (loaded.shape[0], loaded.shape[1], 2, 2)))
        scale0, scale2 = tl.split(even)
        scale1, scale3 = tl.split(odd)
        scale0, scale1 = unit * scale0.to(tl.float32), unit * scale1.to(tl.float32)
        scale2, scale3 = unit * scale2.to(tl.float32), unit * scale3.to(tl.float32)
        return scale0, scale1, scale2, scale3, 0.0, 0.0
    else:
        scale0, scale1 = tl.split(loaded)
        if STORED == "Q4_1" or STORED == "Q5_1":
            low0, low1 = _low_half(scale0), _low_half(scale1)
            return low0, low0, low1, low1, _high_half(scale0), _high_half(scale1)
        elif STORED == "Q4_K" or STORED == "Q5_K":
            unit, least = _low_half(units), -_high_half(units)
            low0, low1 = unit * _byte(scale0), unit * _byte(scale1)
            return low0, low0, low1, low1, least * _byte(scale0 >> 8), least * _byte(scale1 >> 8)
        else:
            scale0, scale1 = scale0.to(tl.float32), scale1.to(tl.float32)
            return scale0, scale0, scale1, scale1, 0.0, 0.0


@triton.jit
def _byte(code: tl.tensor) -> tl.tensor:
    return _whole((code & 255).to(tl.uint32), 0)


@triton.jit
def _low_half(word: tl.tensor) -> tl.tensor:
    """The float16 in the lower half of a word."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(word: tl.tensor) -> tl.tensor:
    return (word >> 16 & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _quarter(
    words: tl.tensor, high: tl.tensor, scale: tl.tensor, more: tl.tensor, P: tl.constexpr, STORED: tl.constexpr
) -> tl.tensor:
    """Values 16 P to 16 P + 16 of each 64: [BLOCK_N, groups of 64, 8, 2]."""
    codes = pairs_of(words, high, P, STORED)
    if STORED == "Q4_0":
        # (1 + code / 16) times 16 scales, less 24 scales: exact, and one instruction.
        more = (scale * -24)[:, :, None]
        scale = scale * 16
        even, odd = _over_16(codes & 0xFFFF), _over_16(codes >> 16)
        return tl.join(even * scale[:, :, None] + more, odd * scale[:, :, None] + more)
    even = _number(codes & 0xFFFF, STORED) * scale[:, :, None]
    odd = _number(codes >> 16, STORED) * scale[:, :, None]
    if STORED == "Q4_1" or STORED == "Q5_1" or STORED == "Q4_K" or STORED == "Q5_K":
        even += more[:, :, None]
        odd += more[:, :, None]
    return tl.join(even, odd)


@triton.jit
def _q4_0(words: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Values 16 p to 16 p + 16 of each 64, for each p: codes are taken where they are after the fewest shifts."""
    up8, up12, down8, down12 = words << 8, words << 12, words >> 8, words >> 12
    v0 = tl.join(_q4_0_at(up12, first, 12), _q4_0_at(words, first, 16))
    v1 = tl.join(_q4_0_at(up8, first, 12), _q4_0_at(down8, first, 12))
    v2 = tl.join(_q4_0_at(up8, second, 16), _q4_0_at(down8, second, 16))
    v3 = tl.join(_q4_0_at(words, second, 12), _q4_0_at(down12, second, 16))
    return v0, v1, v2, v3


@triton.jit
def _q4_0_at(words: tl.tensor, scale: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """Of the codes in the bits from PLACE on. In a mantissa they are 1 + code / unit, and all steps are exact."""
    unit: tl.constexpr = 2.0 ** (23 - PLACE)
    # One instruction masks and adds the exponent, if only one of the two numbers is known when it is compiled.
    exponent = (0x3F800000 + tl.program_id(2)).to(tl.uint32)  # no grid has a third dimension
    number = (words & (15 << PLACE) | exponent).to(tl.float32, bitcast=True)
    return number * (scale * unit)[:, :, None] - (scale * (unit + 8))[:, :, None]


@triton.jit
def _number(code: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    """What a code stands for, before it is scaled: float32."""
    if STORED == "IQ4_NL":
        return iq4_value(code)
    elif STORED == "Q8_0":
        return _whole(code ^ 128, 128)  # with its sign bit turned over, a code is 128 more
    elif STORED == "F8_E4M3":
        return _e4m3(code)
    else:
        zero: tl.constexpr = 8 if STORED == "Q4_0" else 16 if STORED == "Q5_0" else 32 if STORED == "Q6_K" else 0
        return _whole(code, zero)


@triton.jit
def _whole(code: tl.tensor, ZERO: tl.constexpr) -> tl.tensor:
    """code - ZERO."""
    return (code.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _over_16(code: tl.tensor) -> tl.tensor:
    """1 + code / 16."""
    return (code << 19 | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def iq4_value(code: tl.tensor) -> tl.tensor:
    """-127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, by code: the nearest integers to a polynomial."""
    x = _over_16(code)
    near = (((103.9429 * x - 288.44155) * x - 109.54607) * x + 1055.4265) * x - 887.94877
    return (near + 12582912.0) - 12582912.0


@triton.jit
def _e4m3(codes: tl.tensor) -> tl.tensor:
    """Exponent and mantissa, put where a float32 has them, give 2 ** -120 of the value; NaN is not looked for."""
    return ((codes & 128) << 24 | (codes & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
