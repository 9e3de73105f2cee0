"""Rows of inputs in the order in which words have the codes that they are multiplied with: of packed_vectors.py.

Neighbouring threads have neighbouring pieces, whose inputs of one place are 32 or 64 apart: each load touches many
lines of a cache. Interleaved inputs are for one type of weight: those of 32 pieces in one place follow on each other.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types;
# tuples grow by what is added to them, which is what it takes.
# ruff: noqa: N803, RUF005
# mypy: disable-error-code="untyped-decorator,assignment,no-any-return"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_codes import piece_inputs, pieces_of
from lazyio.kernels.packed_tiles import load

# Pieces whose inputs of one place follow on each other, where they are interleaved; eight inputs of each.
_TOGETHER = tl.constexpr(32)


@triton.constexpr_function
def interleaved_size(stored: str, inputs: int, slots: int) -> int:
    """How many elements interleaved inputs of so many slots take."""
    return -(-slots * pieces_of(stored, inputs) // 32) * 32 * piece_inputs(stored)


@triton.jit
def interleaved_place(column: tl.tensor, slot: tl.tensor, STORED: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    """Where an input of a slot is, interleaved for weights of this type."""
    of_piece: tl.constexpr = piece_inputs(STORED)
    piece = slot * pieces_of(STORED, K) + column // (2 * of_piece) * 2 + column % 16 // 8
    block = piece // _TOGETHER * (of_piece // 8) + column % (2 * of_piece) // 16
    return (block * _TOGETHER + piece % _TOGETHER) * 8 + column % 8


@triton.jit
def first_fours(
    four: tl.tensor, STORED: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tl.tensor:
    """Where pieces have their inputs of the first place, by fours: each has two, and counts them through all slots."""
    of_piece: tl.constexpr = piece_inputs(STORED)
    if INTERLEAVED:
        column = four + four // (2 * _TOGETHER) * (2 * _TOGETHER * (of_piece // 8 - 1))
    else:
        column = four + four // 4 * (of_piece // 2 - 4)
        if SLOTS > 1:
            of_row: tl.constexpr = pieces_of(STORED, K)
            slot = tl.minimum(four // (of_row * 2), SLOTS - 1)
            column += slot * ((K - of_row * of_piece) // 4)
    return column


@triton.jit
def inputs_of(
    x: tl.tensor,
    at: tl.tensor,
    column: tl.tensor,
    first: tl.tensor,
    live: tl.tensor,
    PLACE: tl.constexpr,
    STORED: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tuple:
    """What codes of one place are multiplied with, those of lower halves and then of upper: 8 float32 [1, PIECES]."""
    use = live
    if K % 64 != 0:
        use = use & (first + 16 * PLACE < K)
    masked: tl.constexpr = CHECKED or K % 64 != 0
    x += at
    stride: tl.constexpr = 2 * _TOGETHER if INTERLEAVED else 4
    if x.dtype.element_ty == tl.float32:
        two, others = (
            _two_words(x, column * 2 + 2 * stride * PLACE, use, masked),
            _two_words(x, column * 2 + 2 * stride * PLACE + 1, use, masked),
        )
        lower0, lower2 = tl.split(two.to(tl.uint32).to(tl.float32, bitcast=True))
        upper0, upper2 = tl.split((two >> 32).to(tl.uint32).to(tl.float32, bitcast=True))
        lower1, lower3 = tl.split(others.to(tl.uint32).to(tl.float32, bitcast=True))
        upper1, upper3 = tl.split((others >> 32).to(tl.uint32).to(tl.float32, bitcast=True))
    else:
        two, others = tl.split(_two_words(x, column + stride * PLACE, use, masked))
        lower0, upper0 = _two_halves(two.to(tl.uint32), x.dtype.element_ty)
        lower1, upper1 = _two_halves((two >> 32).to(tl.uint32), x.dtype.element_ty)
        lower2, upper2 = _two_halves(others.to(tl.uint32), x.dtype.element_ty)
        lower3, upper3 = _two_halves((others >> 32).to(tl.uint32), x.dtype.element_ty)
    found = (lower0, lower1, lower2, lower3, upper0, upper1, upper2, upper3)
    if STORED == "F8_E4M3":
        found = _times(found, 1.152921504606847e18)  # 2 ** 60: half of what codes lack
    return found


@triton.jit
def _times(parts: tl.tuple, FACTOR: tl.constexpr) -> tl.tuple:
    found = ()
    for i in tl.static_range(len(parts)):
        found = found + (parts[i] * FACTOR,)
    return found


@triton.jit
def _two_words(x: tl.tensor, place: tl.tensor, use: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """8 bytes for each of two words of pieces: [1, PIECES, 2]."""
    both = load(x.to(tl.pointer_type(tl.int64)) + place, use, MASKED).to(tl.uint64, bitcast=True)
    return tl.reshape(both, (1, both.shape[0] // 2, 2))


@triton.jit
def _two_halves(words: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The numbers of 16 bits in words, as float32."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        lower = (words << 16).to(tl.float32, bitcast=True)
        upper = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        lower = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        upper = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return lower, upper
