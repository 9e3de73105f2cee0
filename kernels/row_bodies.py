"""How the GPU decodes rows of each stored type: the bodies of `expand_rows`, which launches them.

A row is cut in units, and a program takes a run of units, whichever rows they lie in, so that no lane idles where a row
is no power of two. The bytes of a unit are loaded once. Formulas are those of `lazyio.ple.codec`, step by step in
float32; launched without fused multiply-adds, they give the same bits.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def _places(inverse: tl.tensor, n: tl.tensor, PER_ROW: tl.constexpr, UNITS: tl.constexpr) -> tl.tensor:
    """Of each unit of this program: its row of the result, whether there is one, its packed row, its place in it."""
    first = tl.program_id(0).to(tl.int64) * UNITS
    first_row = first // PER_ROW
    # From here on 32 bits are enough, and divide faster.
    ahead = (first - first_row * PER_ROW).to(tl.int32) + tl.arange(0, UNITS)
    row = first_row + ahead // PER_ROW
    live = row < n
    # Units beyond the end decode the first row for nothing: any address that can be read will do.
    packed_row = tl.load(inverse + row, mask=live, other=0).to(tl.int64)
    return row, live, packed_row, ahead % PER_ROW


@triton.jit
def _put(
    values: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    live: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    head: tl.tensor,
    ROW_VALUES: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Store values [units, width] at the columns [units, width] of their rows."""
    if SCALED:
        values = values * scale
    if BIASED:
        heads = tl.load(head + row, mask=live, other=0).to(tl.int64)
        values = values + tl.load(bias + heads[:, None] * ROW_VALUES + column)
    place = out + row[:, None] * out_stride + column
    tl.store(place, values.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def one_plane(
    packed: tl.tensor,
    words: tl.tensor,
    inverse: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    head: tl.tensor,
    DECODE: tl.constexpr,
    ROW_UNITS: tl.constexpr,  # elements of `packed` in a row
    ROW_VALUES: tl.constexpr,
    WIDTH: tl.constexpr,  # values of a unit
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Types whose values lie in order, one after the other."""
    row, live, packed_row, unit = _places(inverse, n, ROW_VALUES // WIDTH, UNITS)
    lane = tl.arange(0, WIDTH)[None, :]
    values = DECODE(packed, words, (packed_row * ROW_UNITS)[:, None], unit[:, None], lane, WIDTH)
    column = unit[:, None] * WIDTH + lane
    _put(values, row, column, live, out, out_stride, scale, bias, head, ROW_VALUES, SCALED, BIASED)


@triton.jit
def two_planes(
    packed: tl.tensor,
    words: tl.tensor,
    inverse: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    head: tl.tensor,
    DECODE: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    ROW_VALUES: tl.constexpr,
    WIDTH: tl.constexpr,  # bytes whose low halves and high halves are a run of values each
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Types that put two values in a byte, WIDTH places apart. A unit is 16 bytes."""
    row, live, packed_row, unit = _places(inverse, n, ROW_VALUES // 32, UNITS)
    lane = tl.arange(0, 16)[None, :]
    low, high = DECODE(packed, words, (packed_row * ROW_UNITS)[:, None], unit[:, None], lane)
    parts: tl.constexpr = WIDTH // 16
    column = (unit // parts * (2 * WIDTH) + unit % parts * 16)[:, None] + lane
    _put(low, row, column, live, out, out_stride, scale, bias, head, ROW_VALUES, SCALED, BIASED)
    _put(high, row, column + WIDTH, live, out, out_stride, scale, bias, head, ROW_VALUES, SCALED, BIASED)


@triton.jit
def exl3(
    packed: tl.tensor,
    words: tl.tensor,
    inverse: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    head: tl.tensor,
    DECODE: tl.constexpr,  # bits of a code
    ROW_UNITS: tl.constexpr,
    ROW_VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Rings of codes. A unit is 8 values, whose own codes are whole bytes, as many as a code has bits."""
    row, live, packed_row, unit = _places(inverse, n, ROW_VALUES // WIDTH, UNITS)
    bits: tl.constexpr = DECODE
    start = packed_row * ROW_UNITS
    own = start + 2 + unit * bits
    # The 16 bits before them hold all earlier codes that matter; before the first is the ring's end.
    around = 20 * bits
    second = own - 1 + tl.where(unit == 0, around, 0)
    first = own - 2 + tl.where(unit * bits < 2, around, 0)
    earlier = tl.load(packed + first).to(tl.uint32) | tl.load(packed + second).to(tl.uint32) << 8
    codes = tl.load(packed + own).to(tl.uint64)
    for byte in tl.static_range(1, bits):
        codes |= tl.load(packed + own + byte).to(tl.uint64) << (8 * byte)
    back: tl.constexpr = (15 + bits) // bits - 1
    state = tl.zeros_like(earlier)
    for place in tl.static_range(back):
        state = state << bits | (earlier >> (16 - (back - place) * bits)) & ((1 << bits) - 1)
    state0 = _next_state(state, codes, 0, bits)
    state1 = _next_state(state0, codes, 1, bits)
    state2 = _next_state(state1, codes, 2, bits)
    state3 = _next_state(state2, codes, 3, bits)
    state4 = _next_state(state3, codes, 4, bits)
    state5 = _next_state(state4, codes, 5, bits)
    state6 = _next_state(state5, codes, 6, bits)
    state7 = _next_state(state6, codes, 7, bits)
    even = tl.join(tl.join(state0, state4), tl.join(state2, state6))
    odd = tl.join(tl.join(state1, state5), tl.join(state3, state7))
    states = tl.reshape(tl.join(even, odd), (UNITS, 8))
    values = _mul1(states) * _half(words, start[:, None])
    column = unit[:, None] * 8 + tl.arange(0, 8)[None, :]
    _put(values, row, column, live, out, out_stride, scale, bias, head, ROW_VALUES, SCALED, BIASED)


@triton.jit
def _next_state(state: tl.tensor, codes: tl.tensor, number: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    code = (codes >> (number * bits)).to(tl.uint32) & ((1 << bits) - 1)
    return (state << bits | code) & 0xFFFF


@triton.jit
def _mul1(states: tl.tensor) -> tl.tensor:
    """The codebook of EXL3's n-gram tables; lazyio/ple/exl3.py has its formula."""
    hashed = states * 0x83DCD12D
    total = (hashed & 255) + (hashed >> 8 & 255) + (hashed >> 16 & 255) + (hashed >> 24)
    # The float16 of bits 0x1EEE and 0xC931.
    exact = (total + 1024).to(tl.float32) * 0.00676727294921875 - 10.3828125
    return exact.to(tl.float16).to(tl.float32)


@triton.jit
def _half(words: tl.tensor, at: tl.tensor) -> tl.tensor:
    """The float16 at byte `at`, which is even."""
    return tl.load(words + (at >> 1)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def floats(
    packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """Values of 2 or 4 bytes."""
    return tl.load(packed + start + unit * WIDTH + lane).to(tl.float32)


@triton.jit
def bf16(
    packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """The upper half of a float32."""
    code = tl.load(packed + start + unit * WIDTH + lane).to(tl.uint32)
    return (code << 16).to(tl.float32, bitcast=True)


@triton.jit
def f8_e4m3(
    packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """Its exponent and mantissa, put where a float16 has them, give 1/256 of the value."""
    code = tl.load(packed + start + unit * WIDTH + lane).to(tl.uint16)
    small = ((code & 128) << 8 | (code & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where((code & 127) == 127, float("nan"), small * 256)


@triton.jit
def f8_e5m2(
    packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """The upper half of a float16."""
    code = tl.load(packed + start + unit * WIDTH + lane).to(tl.uint16)
    return (code << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def q8_0(
    packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """34 bytes: a scale, 32 values."""
    at = start + unit * 34
    return tl.load(packed + at + 2 + lane).to(tl.int8, bitcast=True).to(tl.float32) * _half(words, at)


@triton.jit
def q4_0(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """18 bytes: a scale, codes."""
    at = start + unit * 18
    scale, codes = _half(words, at), tl.load(packed + at + 2 + lane)
    return scale * ((codes & 15).to(tl.float32) - 8), scale * ((codes >> 4).to(tl.float32) - 8)


@triton.jit
def q4_1(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """20 bytes: a scale, the least value, codes."""
    at = start + unit * 20
    scale, least, codes = _half(words, at), _half(words, at + 2), tl.load(packed + at + 4 + lane)
    return scale * (codes & 15).to(tl.float32) + least, scale * (codes >> 4).to(tl.float32) + least


@triton.jit
def _five_bits(packed: tl.tensor, words: tl.tensor, at: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Codes of which `at` has the fifth bits of 32, then the other four of each."""
    fifth = tl.load(words + (at >> 1)).to(tl.uint32) | tl.load(words + (at >> 1) + 1).to(tl.uint32) << 16
    codes = tl.load(packed + at + 4 + lane).to(tl.uint32)
    low = codes & 15 | (fifth >> lane & 1) << 4
    high = codes >> 4 | (fifth >> (lane + 16) & 1) << 4
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def q5_0(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """22 bytes: a scale, fifth bits, codes."""
    at = start + unit * 22
    scale = _half(words, at)
    low, high = _five_bits(packed, words, at + 2, lane)
    return scale * (low - 16), scale * (high - 16)


@triton.jit
def q5_1(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """24 bytes: a scale, the least value, fifth bits, codes."""
    at = start + unit * 24
    scale, least = _half(words, at), _half(words, at + 2)
    low, high = _five_bits(packed, words, at + 4, lane)
    return scale * low + least, scale * high + least


@triton.jit
def _iq4_value(code: tl.tensor) -> tl.tensor:
    """-127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, of which the constants hold value + 128 in bytes."""
    table = tl.where(code < 8, 0x766A5D4F3F2D1801, 0xF1D9C5B5A6998D81)
    return (table >> ((code & 7) * 8).to(tl.uint64) & 255).to(tl.float32) - 128


@triton.jit
def iq4_nl(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """18 bytes: a scale, codes of a fixed list."""
    at = start + unit * 18
    scale, codes = _half(words, at), tl.load(packed + at + 2 + lane)
    return scale * _iq4_value(codes & 15), scale * _iq4_value(codes >> 4)


@triton.jit
def _e2m1_value(code: tl.tensor) -> tl.tensor:
    """Twice the value of a 4-bit float: 0 1 2 3 4 6 8 12, whose hex digits are the constant, with a sign."""
    wide = code.to(tl.uint32)
    magnitude = (0xC8643210 >> ((wide & 7) * 4) & 15).to(tl.int32)
    return tl.where(wide < 8, magnitude, -magnitude).to(tl.float32)


@triton.jit
def mxfp4(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """17 bytes: an exponent, codes that are floats."""
    at = start + unit * 17
    exponent = tl.load(packed + at).to(tl.uint32)
    # Half of 2 ** (exponent - 127), since codes stand for twice their value; the two smallest are subnormal.
    half = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23).to(tl.float32, bitcast=True)
    codes = tl.load(packed + at + 1 + lane)
    return half * _e2m1_value(codes & 15), half * _e2m1_value(codes >> 4)


@triton.jit
def _k_scale(packed: tl.tensor, words: tl.tensor, at: tl.tensor, part: tl.tensor) -> tl.tensor:
    """Scale and least value of one of a block's 8 parts, from 6 bits each."""
    first = tl.load(packed + at + 4 + part)
    second = tl.load(packed + at + 8 + part)
    upper = tl.load(packed + at + 4 + (part & 3))
    scale = tl.where(part < 4, first & 63, (second & 15) | (upper >> 2 & 48))
    least = tl.where(part < 4, second & 63, (second >> 4) | (first >> 2 & 48))
    return _half(words, at) * scale.to(tl.float32), _half(words, at + 2) * least.to(tl.float32)


@triton.jit
def q4_k(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """144 bytes: scales of 8 parts, codes."""
    at, within = start + unit // 8 * 144, unit % 8
    scale0, least0 = _k_scale(packed, words, at, within // 2 * 2)
    scale1, least1 = _k_scale(packed, words, at, within // 2 * 2 + 1)
    codes = tl.load(packed + at + 16 + within * 16 + lane)
    return scale0 * (codes & 15).to(tl.float32) - least0, scale1 * (codes >> 4).to(tl.float32) - least1


@triton.jit
def q5_k(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """176 bytes: scales of 8 parts, fifth bits, codes."""
    at, within = start + unit // 8 * 176, unit % 8
    part = within // 2 * 2
    scale0, least0 = _k_scale(packed, words, at, part)
    scale1, least1 = _k_scale(packed, words, at, part + 1)
    fifth = tl.load(packed + at + 16 + within % 2 * 16 + lane).to(tl.uint32) >> part
    codes = tl.load(packed + at + 48 + within * 16 + lane).to(tl.uint32)
    low, high = codes & 15 | (fifth & 1) << 4, codes >> 4 | (fifth >> 1 & 1) << 4
    return scale0 * low.to(tl.float32) - least0, scale1 * high.to(tl.float32) - least1


@triton.jit
def q6_k(packed: tl.tensor, words: tl.tensor, start: tl.tensor, unit: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """210 bytes: codes, their upper 2 bits, scales of 16 parts, the scale of these."""
    at, half, part = start + unit // 8 * 210, unit // 4 % 2, unit % 4
    scales = packed + at + 192 + half * 8 + part
    scale, scale0, scale1 = _half(words, at + 208), tl.load(scales), tl.load(scales + 4)
    codes = tl.load(packed + at + half * 64 + part * 16 + lane).to(tl.int32)
    upper = tl.load(packed + at + 128 + half * 32 + part % 2 * 16 + lane).to(tl.int32) >> (part // 2 * 2)
    low, high = codes & 15 | (upper & 3) << 4, codes >> 4 | (upper >> 4 & 3) << 4
    scale0 = scale * scale0.to(tl.int8, bitcast=True).to(tl.float32)
    scale1 = scale * scale1.to(tl.int8, bitcast=True).to(tl.float32)
    return scale0 * (low - 32).to(tl.float32), scale1 * (high - 32).to(tl.float32)
