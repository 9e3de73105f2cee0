"""Rows of inputs in the order in which words have the codes that they are multiplied with: of packed_vectors.py."""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types;
# tuples grow by what is added to them, which is what it takes.
# ruff: noqa: N803, RUF005
# mypy: disable-error-code="untyped-decorator,assignment"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_tiles import load


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
) -> tl.tuple:
    """What codes of one place are multiplied with, those of lower halves and then of upper: 8 float32 [1, PIECES]."""
    use = live
    if K % 64 != 0:
        use = use & (first + 16 * PLACE < K)
    masked: tl.constexpr = CHECKED or K % 64 != 0
    x += at
    if x.dtype.element_ty == tl.float32:
        two, others = (
            _two_words(x, column * 2 + 8 * PLACE, use, masked),
            _two_words(x, column * 2 + 8 * PLACE + 1, use, masked),
        )
        lower0, lower2 = tl.split(two.to(tl.uint32).to(tl.float32, bitcast=True))
        upper0, upper2 = tl.split((two >> 32).to(tl.uint32).to(tl.float32, bitcast=True))
        lower1, lower3 = tl.split(others.to(tl.uint32).to(tl.float32, bitcast=True))
        upper1, upper3 = tl.split((others >> 32).to(tl.uint32).to(tl.float32, bitcast=True))
    else:
        two, others = tl.split(_two_words(x, column + 4 * PLACE, use, masked))
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
