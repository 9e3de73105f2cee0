"""Codes of quantised weights made floats, of the words that a thread has: what packed_vectors.py multiplies.

A code is put into the mantissa of a float. What this has too much, `left_over`, is taken off the sum of products; or
off the float, if EXACT: then nothing of a float32 input is lost, for one more instruction a code.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-any-return"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_tiles import iq4_value

# By how much a word is moved to the left, or to the right if negative, and from which bit on it then has a code: codes
# in the order of bits, of four, of five or six that are a byte apart, and of eight.
_FOUR = ((15, 15), (15, 19), (7, 15), (7, 19), (0, 16), (-9, 11), (-9, 15), (-9, 19))
_SIX = ((0, 0), (0, 8), (0, 16), (-8, 16))
_EIGHT = ((0, 0), (0, 8), (-1, 15), (-9, 15))
# Codes from a lower bit on are too small a part of the float: what it has too much is taken off at once.
_LEAST_BIT = 12


@triton.constexpr_function
def of_eight(stored: str) -> bool:
    """Whether codes have 8 bits."""
    return stored in ("Q8_0", "F8_E4M3")


@triton.constexpr_function
def has_least(stored: str) -> bool:
    """Whether there are least values beside scales."""
    return stored in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


@triton.constexpr_function
def has_high(stored: str) -> bool:
    """Whether high bits lie elsewhere."""
    return stored in ("Q5_0", "Q5_1", "Q5_K", "Q6_K")


@triton.constexpr_function
def piece_inputs(stored: str) -> int:
    """How many codes the four words of a piece have."""
    return 16 if of_eight(stored) else 32


@triton.constexpr_function
def pieces_of(stored: str, inputs: int) -> int:
    """How many pieces there are in a row: rows are filled up to a whole number of 64."""
    return -(-inputs // 64) * (4 if of_eight(stored) else 2)


@triton.constexpr_function
def _placed(stored: str, half: int, place: int) -> tuple[int, int]:
    """Of the code in this half and place: how its word is moved, and its first bit then."""
    if of_eight(stored):
        return _EIGHT[2 * half + place % 2]
    if has_high(stored):
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
def _is_far(first_bit: int, exact: bool) -> bool:
    """Whether a code from this bit on is so small a part of a float that the rest of it is taken off at once."""
    return exact or first_bit < _LEAST_BIT


@triton.constexpr_function
def left_over(stored: str, half: int, place: int, exact: bool) -> float:
    """What `value` has too much."""
    _, first_bit = _placed(stored, half, place)
    if stored in ("IQ4_NL", "F8_E4M3") or _is_far(first_bit, exact):
        return 0.0
    return _over(stored, first_bit)


@triton.jit
def with_high(words: tl.tensor, high: tl.tensor, ODD: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """Codes of even or of odd places with their high bits, a byte each."""
    if STORED == "Q6_K":
        high = high & 255 | high << 8 & 0x00FF0000
        high |= high << 4
        high = (high << 2 if ODD else high << 4) & 0x30303030
    else:
        # The bits of the lower half and of the upper half, those of places 2 and 3 a byte further.
        high = high & 15 | high << 12 & 0x000F0000
        high |= high << 6
        high = (high << 3 if ODD else high << 4) & 0x10101010
    return (words >> 4 if ODD else words) & 0x0F0F0F0F | high


@triton.jit
def value(
    words: tl.tensor, HALF: tl.constexpr, PLACE: tl.constexpr, STORED: tl.constexpr, EXACT: tl.constexpr
) -> tl.tensor:
    """What the code of a half and a place stands for and what it has too much."""
    if STORED == "IQ4_NL":
        found = iq4_value(words >> (16 * HALF + 4 * PLACE) & 15)
    elif STORED == "F8_E4M3":
        # Its sign fills what is before its exponent; the value lacks 2 ** 120.
        left: tl.constexpr = 24 - 16 * HALF - 8 * (PLACE % 2)
        signed = (words << left).to(tl.int32, bitcast=True) >> 4
        found = (signed.to(tl.uint32, bitcast=True) & 0x87F00000).to(tl.float32, bitcast=True)
    else:
        found = _in_mantissa(words, _placed(STORED, HALF, PLACE)[0], _placed(STORED, HALF, PLACE)[1], STORED, EXACT)
    return found


@triton.jit
def _in_mantissa(
    words: tl.tensor, MOVE: tl.constexpr, FIRST_BIT: tl.constexpr, STORED: tl.constexpr, EXACT: tl.constexpr
) -> tl.tensor:
    """The bits of a code from one on, as a float that has `_over` too much, or nothing too much: see `_is_far`."""
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
    if _is_far(FIRST_BIT, EXACT):
        found = found - _over(STORED, FIRST_BIT)
    return found


@triton.constexpr_function
def _mask(stored: str, first_bit: int) -> int:
    return (255 if stored == "Q8_0" else 63 if has_high(stored) else 15) << first_bit


@triton.constexpr_function
def _exponent(stored: str, first_bit: int) -> int:
    """The exponent with which codes from this bit on are whole; those of Q8_0 have their sign bits turned over."""
    return (127 + 23 - first_bit << 23) | (128 << first_bit if stored == "Q8_0" else 0)
