"""Products of very few rows with quantised weights, in the bodies of kernels: `row_products`.

    y = row_products(x, at, p0, p1, p2, p3, expert, n, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, UNROLL)

are float32 [BLOCK_N], the products of a row of x with rows n of a weight. No tensor cores take part: time goes by the
weight's bytes, and by instructions, of which there are about three for each code. A code is put into the mantissa of a
float, and what this has too much is taken off the sum of products before, from x.

* x points to float32, bfloat16 or float16, aligned to 4 bytes; `at` is where the row of x is, in pairs of values.
* p0 to p3, STORED, N, K, ROWS and COLUMNS are as in packed_tiles.py; of fp8, COLUMNS are a multiple of 32, or K, and K
  is a multiple of 32 for all.
* expert is an integer; or, with several SLOTS, points to that of each, and products are summed over slots: in x, the
  inputs of one follow on those of another. n [BLOCK_N] are rows, all below N.
* A piece is what a thread loads at once: four words, with 32 codes, or with 16 if they have 8 bits. PIECES of a row, a
  power of two, are taken at once by as many threads, and UNROLL times so many before the next are asked for. What is
  made of x serves all rows that a thread has: let PIECES be less than an eighth of all threads.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_tiles import iq4_value, loaded_scales, scale_rows, scales_of

# By how much a word is moved to the left, or to the right if negative, and from which bit on it then has a code: codes
# in the order of bits, of four, of five or six that are a byte apart, and of eight.
_FOUR = ((15, 15), (15, 19), (7, 15), (7, 19), (0, 16), (-9, 11), (-9, 15), (-9, 19))
_SIX = ((0, 0), (0, 8), (0, 16), (-8, 16))
_EIGHT = ((0, 0), (0, 8), (-1, 15), (-9, 15))
# Codes from a lower bit on are too small a part of the float: what it has too much is taken off at once.
_LEAST_BIT = 12


@triton.constexpr_function
def _of_eight(stored: str) -> bool:
    return stored in ("Q8_0", "F8_E4M3")


@triton.constexpr_function
def _has_least(stored: str) -> bool:
    return stored in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


@triton.constexpr_function
def _has_high(stored: str) -> bool:
    return stored in ("Q5_0", "Q5_1", "Q5_K", "Q6_K")


@triton.constexpr_function
def piece_inputs(stored: str) -> int:
    """How many codes the four words of a piece have."""
    return 16 if stored in ("Q8_0", "F8_E4M3") else 32


@triton.constexpr_function
def pieces_of(stored: str, inputs: int) -> int:
    """How many pieces there are in a row: rows are filled up to a whole number of 64."""
    return -(-inputs // 64) * (4 if stored in ("Q8_0", "F8_E4M3") else 2)


@triton.constexpr_function
def _scales_of_weight(stored: str, outputs: int, inputs: int, rows: int, columns: int) -> int:
    """How many elements the plane of scales of a weight has."""
    if stored == "F8_E4M3":
        return -(-outputs // rows) * -(-inputs // columns)
    return outputs * (inputs // (16 if stored == "Q6_K" else 32))


@triton.constexpr_function
def _placed(stored: str, half: int, place: int) -> tuple[int, int]:
    """Of the code in this half and place: how its word is moved, and its first bit then."""
    if stored in ("Q8_0", "F8_E4M3"):
        return _EIGHT[2 * half + place % 2]
    if stored in ("Q5_0", "Q5_1", "Q5_K", "Q6_K"):
        return _SIX[2 * half + place // 2]
    return _FOUR[4 * half + place]


@triton.constexpr_function
def _zero(stored: str) -> int:
    return 8 if stored == "Q4_0" else 16 if stored == "Q5_0" else 32 if stored == "Q6_K" else 128 * (stored == "Q8_0")


@triton.constexpr_function
def _over(stored: str, first_bit: int) -> float:
    """What a code from this bit on of a mantissa is more than what it stands for."""
    return 2.0 ** (23 - first_bit) + _zero(stored)


@triton.constexpr_function
def _is_far(first_bit: int) -> bool:
    """Whether a code from this bit on is so small a part of a float that the rest of it is taken off at once."""
    return first_bit < _LEAST_BIT


@triton.constexpr_function
def _left_over(stored: str, half: int, place: int) -> float:
    """What `_value` has too much."""
    _, first_bit = _placed(stored, half, place)
    if stored in ("IQ4_NL", "F8_E4M3") or _is_far(first_bit):
        return 0.0
    return _over(stored, first_bit)


@triton.jit
def row_products(
    x: tl.tensor,
    at: tl.tensor,
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tl.tensor:
    """See above."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    steps: tl.constexpr = (SLOTS * of_row + PIECES - 1) // PIECES
    checked: tl.constexpr = SLOTS * of_row % PIECES != 0 or steps % UNROLL != 0
    acc = tl.zeros((n.shape[0], PIECES), tl.float32)
    for first in range(0, steps, UNROLL):
        for i in tl.static_range(UNROLL):
            start = (first + i) * PIECES
            acc = _add_pieces(
                acc, x, at, p0, p1, p2, p3, expert, n, start, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, checked
            )
    return tl.sum(acc, 1)


@triton.jit
def _add_pieces(
    acc: tl.tensor,
    x: tl.tensor,
    at: tl.tensor,
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    start: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tensor:
    """`acc` and the products of the pieces from `start` on."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    # Tiles are of rows and words; or of pieces and rows, by which Triton shares them out among threads in the same way.
    word, piece = start * 4 + tl.arange(0, PIECES * 4), start + tl.arange(0, PIECES)
    live = word < SLOTS * of_row * 4
    # Two inputs follow on each other for each half of a word, and those of its next place 16 further.
    group: tl.constexpr = 2 * piece_inputs(STORED)
    pair = at + (word + word // 8 * (group // 2 - 8))
    of_words, of_pieces = expert, expert
    if SLOTS > 1:
        slot = tl.minimum(word // (of_row * 4), SLOTS - 1)
        pair += slot * ((K - of_row * piece_inputs(STORED)) // 2)
        of_words = tl.load(expert + slot)[None, :]
        of_pieces = tl.load(expert + tl.minimum(piece // of_row, SLOTS - 1))[:, None]
    if SLOTS > 1 or CHECKED:
        word, piece = word % (of_row * 4), piece % of_row
    first = word // 8 * group
    of_words, of_pieces = tl.cast(of_words, tl.int64), tl.cast(of_pieces, tl.int64)
    of_weight: tl.constexpr = N * of_row * 4
    words = tl.load(p0 + n.to(tl.int64)[:, None] * (of_row * 4) + (of_words * of_weight + word[None, :]))
    words = words.to(tl.uint32, bitcast=True)
    p2 += of_pieces * _scales_of_weight(STORED, N, K, ROWS, COLUMNS)
    row = scale_rows(0, n[None, :], STORED, N, ROWS)
    lower0, upper0 = _inputs(x, pair, first, live, 0, STORED, K, CHECKED)
    lower1, upper1 = _inputs(x, pair, first, live, 1, STORED, K, CHECKED)
    if _of_eight(STORED):
        scale = _byte_scales(p2, row, piece, STORED, K, COLUMNS)
        acc += scale * _of_pieces(_two_places(words, words, lower0, upper0, lower1, upper1, 0, STORED))
    else:
        even, odd = words, words
        if _has_high(STORED):
            even, odd = _with_high(p1, n, of_pieces, words, piece, STORED, N, K)
        lower2, upper2 = _inputs(x, pair, first, live, 2, STORED, K, CHECKED)
        lower3, upper3 = _inputs(x, pair, first, live, 3, STORED, K, CHECKED)
        if STORED == "Q6_K":
            p3 += of_pieces * (N * K // 256)
            s0, s1, s2, s3 = _scales_of_16(p2, p3, row, piece, K)
            acc += s0 * _of_pieces(_one_place(even, lower0, upper0, 0, STORED))
            acc += s1 * _of_pieces(_one_place(odd, lower1, upper1, 1, STORED))
            acc += s2 * _of_pieces(_one_place(even, lower2, upper2, 2, STORED))
            acc += s3 * _of_pieces(_one_place(odd, lower3, upper3, 3, STORED))
        else:
            if SLOTS > 1:
                p2, p3 = p2[:, :, None], (p3 + of_pieces * (N * K // 256))[:, :, None]
            else:
                p3 += of_pieces * (N * K // 256)
            loaded, units = loaded_scales(
                p2, p3, row[:, :, None], (piece // 2)[:, None, None], STORED, K, COLUMNS, K % 64 != 0
            )
            s0, s1, s2, s3, more0, more1 = scales_of(loaded, units, STORED)
            first = _two_places(even, odd, lower0, upper0, lower1, upper1, 0, STORED)
            second = _two_places(even, odd, lower2, upper2, lower3, upper3, 2, STORED)
            if _has_least(STORED):
                first, inputs = _of_pieces_both(first, lower0 + upper0 + lower1 + upper1)
                acc += tl.trans(s0) * first
                acc += tl.trans(more0) * inputs
                second, inputs = _of_pieces_both(second, lower2 + upper2 + lower3 + upper3)
                acc += tl.trans(s2) * second
                acc += tl.trans(more1) * inputs
            else:
                acc += tl.trans(s0) * _of_pieces(first)
                acc += tl.trans(s2) * _of_pieces(second)
    return acc


@triton.jit
def _of_pieces(words: tl.tensor) -> tl.tensor:
    """Sums over the words of pieces."""
    return tl.sum(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 4)), 2)


@triton.jit
def _of_pieces_both(words: tl.tensor, inputs: tl.tensor) -> tl.tensor:
    """Those of words, and of what is the same for all rows: joined, so that both are shared out in the same way."""
    both = tl.join(words, tl.broadcast_to(inputs, words.shape))
    return tl.split(tl.sum(tl.reshape(both, (words.shape[0], words.shape[1] // 4, 4, 2)), 2))


@triton.jit
def _inputs(
    x: tl.tensor,
    pair: tl.tensor,
    first: tl.tensor,
    live: tl.tensor,
    PLACE: tl.constexpr,
    STORED: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tensor:
    """What codes of one place are multiplied with, those of lower and of upper halves: float32 [1, words]."""
    use = live
    if K % 64 != 0:
        use = use & (first + 16 * PLACE < K)
    masked: tl.constexpr = CHECKED or K % 64 != 0
    place = pair + 8 * PLACE
    if x.dtype.element_ty == tl.float32:
        lower, upper = _some(x + place * 2, use, masked), _some(x + place * 2 + 1, use, masked)
    else:
        both = _some(x.to(tl.pointer_type(tl.int32)) + place, use, masked).to(tl.uint32, bitcast=True)
        if x.dtype.element_ty == tl.bfloat16:
            lower = (both << 16).to(tl.float32, bitcast=True)
            upper = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            lower = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            upper = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    if STORED == "F8_E4M3":
        lower, upper = lower * 1.152921504606847e18, upper * 1.152921504606847e18  # 2 ** 60: half of what codes lack
    return lower[None, :], upper[None, :]


@triton.jit
def _some(place: tl.tensor, use: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    if MASKED:
        return tl.load(place, mask=use, other=0)
    else:
        return tl.load(place)


@triton.jit
def _byte_scales(
    p2: tl.tensor,
    row: tl.tensor,
    piece: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Those of pieces of codes of 8 bits: [BLOCK_N, PIECES]."""
    if STORED == "F8_E4M3":
        place = row * ((K + COLUMNS - 1) // COLUMNS) + (piece // 2 * 32 // COLUMNS)[:, None]
        scale = _some(p2 + place, (piece // 2 * 32 < K)[:, None], K % 64 != 0) * 1.152921504606847e18
    else:
        place = row * (K // 32) + (piece // 2)[:, None]
        scale = _some(p2 + place, (piece // 2 * 32 < K)[:, None], K % 64 != 0).to(tl.float32)
    return tl.trans(scale)


@triton.jit
def _scales_of_16(p2: tl.tensor, p3: tl.tensor, row: tl.tensor, piece: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Those of Q6_K, of each place."""
    unit = tl.load(p3 + (row * (K // 256) + (piece // 8)[:, None])).to(tl.float32)
    four = tl.load(p2.to(tl.pointer_type(tl.int32)) + (row * (K // 64) + (piece // 2)[:, None]))
    four = four.to(tl.uint32, bitcast=True) ^ 0x80808080
    s0, s1 = unit * _byte_number(four, 0), unit * _byte_number(four, 8)
    s2, s3 = unit * _byte_number(four, 16), unit * _byte_number(four, 24)
    return tl.trans(s0), tl.trans(s1), tl.trans(s2), tl.trans(s3)


@triton.jit
def _byte_number(word: tl.tensor, FIRST_BIT: tl.constexpr) -> tl.tensor:
    """A byte of a word, less 128."""
    return (word >> FIRST_BIT & 255 | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _with_high(
    p1: tl.tensor,
    n: tl.tensor,
    expert: tl.tensor,
    words: tl.tensor,
    piece: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """Codes of even and of odd places with their high bits, a byte each. Those of a piece are loaded as one number."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    p1 = p1.to(tl.pointer_type(tl.uint64 if STORED == "Q6_K" else tl.uint32))
    # That pieces follow on each other is hidden from Triton: a thread would load several, and pass them on to others.
    piece = piece ^ tl.program_id(2)  # no grid has a third dimension
    place, each = expert * (N * of_row) + piece[:, None], tl.arange(0, 4)[None, None, :]
    loaded = tl.trans(tl.load(p1 + n.to(tl.int64)[None, :] * of_row + place))[:, :, None]
    if STORED == "Q6_K":
        high = tl.reshape(loaded >> (each * 16).to(tl.uint64), words.shape).to(tl.uint32)
        high = high & 255 | high << 8 & 0x00FF0000
        high |= high << 4
        even, odd = high << 4 & 0x30303030, high << 2 & 0x30303030
    else:
        high = tl.reshape(loaded >> (each * 8).to(tl.uint32), words.shape)
        # The bits of the lower half and of the upper half, those of places 2 and 3 a byte further.
        high = high & 15 | high << 12 & 0x000F0000
        high |= high << 6
        even, odd = high << 4 & 0x10101010, high << 3 & 0x10101010
    return words & 0x0F0F0F0F | even, words >> 4 & 0x0F0F0F0F | odd


@triton.jit
def _two_places(
    even: tl.tensor,
    odd: tl.tensor,
    lower0: tl.tensor,
    upper0: tl.tensor,
    lower1: tl.tensor,
    upper1: tl.tensor,
    PLACE: tl.constexpr,
    STORED: tl.constexpr,
) -> tl.tensor:
    """Products of the codes of a place and the next, summed over the words of a piece."""
    found = _add_left_over(_left_over_sum(lower0, upper0, PLACE, STORED), lower1, upper1, PLACE + 1, STORED)
    found = found + _value(even, 0, PLACE, STORED) * lower0
    found = found + _value(even, 1, PLACE, STORED) * upper0
    found = found + _value(odd, 0, PLACE + 1, STORED) * lower1
    return found + _value(odd, 1, PLACE + 1, STORED) * upper1


@triton.jit
def _one_place(
    words: tl.tensor, lower: tl.tensor, upper: tl.tensor, PLACE: tl.constexpr, STORED: tl.constexpr
) -> tl.tensor:
    """As `_two_places`, of one."""
    found = _left_over_sum(lower, upper, PLACE, STORED)
    found = found + _value(words, 0, PLACE, STORED) * lower
    return found + _value(words, 1, PLACE, STORED) * upper


@triton.jit
def _left_over_sum(lower: tl.tensor, upper: tl.tensor, PLACE: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """What the products of this place have too much, negative."""
    return _add_left_over(tl.zeros(lower.shape, tl.float32), lower, upper, PLACE, STORED)


@triton.jit
def _add_left_over(
    found: tl.tensor, lower: tl.tensor, upper: tl.tensor, PLACE: tl.constexpr, STORED: tl.constexpr
) -> tl.tensor:
    of_lower: tl.constexpr = _left_over(STORED, 0, PLACE)
    of_upper: tl.constexpr = _left_over(STORED, 1, PLACE)
    if of_lower != 0:
        found = found - lower * of_lower
    if of_upper != 0:
        found = found - upper * of_upper
    return found


@triton.jit
def _value(words: tl.tensor, HALF: tl.constexpr, PLACE: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """What the code of a half and a place stands for and what it has too much."""
    if STORED == "IQ4_NL":
        found = iq4_value(words >> (16 * HALF + 4 * PLACE) & 15)
    elif STORED == "F8_E4M3":
        # Its sign fills what is before its exponent; the value lacks 2 ** 120.
        left: tl.constexpr = 24 - 16 * HALF - 8 * (PLACE % 2)
        signed = (words << left).to(tl.int32, bitcast=True) >> 4
        found = (signed.to(tl.uint32, bitcast=True) & 0x87F00000).to(tl.float32, bitcast=True)
    else:
        found = _in_mantissa(words, _placed(STORED, HALF, PLACE)[0], _placed(STORED, HALF, PLACE)[1], STORED)
    return found


@triton.jit
def _in_mantissa(words: tl.tensor, MOVE: tl.constexpr, FIRST_BIT: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """The bits of a code from one on, as a float that has `_over` too much; nothing too much if that is very much."""
    mask: tl.constexpr = _mask(STORED, FIRST_BIT)
    bits: tl.constexpr = _exponent(STORED, FIRST_BIT)
    moved = words << MOVE if MOVE >= 0 else words >> -MOVE
    # One instruction masks and adds the exponent, if only one of the two numbers is known when it is compiled. No grid
    # has a third dimension, which is 0 then; its bits must seem to be among those of the exponent.
    exponent = bits + (tl.program_id(2).to(tl.uint32) << 23)
    if STORED == "Q8_0":
        found = (moved & mask ^ exponent).to(tl.float32, bitcast=True)
    else:
        found = (moved & mask | exponent).to(tl.float32, bitcast=True)
    if _is_far(FIRST_BIT):
        found = found - _over(STORED, FIRST_BIT)
    return found


@triton.constexpr_function
def _mask(stored: str, first_bit: int) -> int:
    return (255 if stored == "Q8_0" else 63 if stored in ("Q5_0", "Q5_1", "Q5_K", "Q6_K") else 15) << first_bit


@triton.constexpr_function
def _exponent(stored: str, first_bit: int) -> int:
    """The exponent with which codes from this bit on are whole; those of Q8_0 have their sign bits turned over."""
    return (127 + 23 - first_bit << 23) | (128 << first_bit if stored == "Q8_0" else 0)
