"""Products of few rows with quantised weights, in the bodies of kernels: `add_products`.

    scales, units = load_scales(p2, p3, expert, n, k, STORED, N, K, BLOCK_K, ROWS, COLUMNS)
    acc = add_products(acc, x, live, p0, p1, scales, units, expert, n, k, STORED, N, K, BLOCK_K)

adds the products of a tile with some rows x; acc is float32 [BLOCK_K // 64, BLOCK_N, M], and `tl.sum(acc, 0)` at
the end the product. This is for few rows (M 8 or 16), where weights' bytes are what takes time: codes are multiplied as
they are, exact in any dtype, and sums of 16 or 32 products scaled then. A row's sums don't depend on other rows. Triton
loads what is multiplied ahead of time, but not scales: ask for those of the next tile before the products of this one.

* x [M] points to the first input of each row, float32, bfloat16 or float16; those that are not `live` [M] count as 0.
* The others are as they are for `packed_tiles.load_tile`; of fp8, COLUMNS are a multiple of 32, or K.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_tiles import e4m3, int8, iq4_value, load, loaded_scales, pairs_of, scales_of, words_of


@triton.jit
def load_scales(
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
    first = (k // 64 + tl.arange(0, BLOCK_K // 64))[:, None, None]
    if STORED == "F8_E4M3":
        row = (n // ROWS).to(tl.int64) + tl.cast(expert, tl.int64) * ((N + ROWS - 1) // ROWS)
        column = first * 64 + 32 * tl.arange(0, 2)[None, None, :]
        place = p2 + (row[None, :, None] * ((K + COLUMNS - 1) // COLUMNS) + column // COLUMNS)
        scales = load(place, column < K, K % BLOCK_K != 0)
        return scales, scales
    else:
        row = n.to(tl.int64) + tl.cast(expert, tl.int64) * N
        return loaded_scales(p2, p3, row[None, :, None], first, STORED, K, K % BLOCK_K != 0)


@triton.jit
def add_products(
    acc: tl.tensor,
    x: tl.tensor,
    live: tl.tensor,
    p0: tl.tensor,
    p1: tl.tensor,
    scales: tl.tensor,
    units: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """See above."""
    row = n.to(tl.int64) + tl.cast(expert, tl.int64) * N
    checked: tl.constexpr = K % BLOCK_K != 0
    first = k // 64 + tl.arange(0, BLOCK_K // 64)
    s0, s1, s2, s3, more0, more1 = scales_of(scales, units, STORED)
    if STORED == "F8_E4M3" or STORED == "Q8_0":
        acc = _add_bytes(acc, x, live, p0, s0, row, first * 64, STORED, K, checked)
        acc = _add_bytes(acc, x, live, p0, s2, row, first * 64 + 32, STORED, K, checked)
    else:
        words, high = words_of(p0, p1, row[None, :, None], first[:, None, None], STORED, K, checked)
        acc = _add_half(acc, x, live, words, high, s0, s1, more0, first * 64, 0, STORED, K, checked)
        acc = _add_half(acc, x, live, words, high, s2, s3, more1, first * 64 + 32, 1, STORED, K, checked)
    return acc


@triton.jit
def _add_bytes(
    acc: tl.tensor,
    x: tl.tensor,
    live: tl.tensor,
    p0: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tensor:
    """Products of 32 of each 64 values, from `start` on."""
    column = start[:, None, None] + tl.arange(0, 32)[None, None, :]
    codes = load(p0 + (row[None, :, None] * K + column), column < K, CHECKED)
    values = int8(codes) if STORED == "Q8_0" else e4m3(codes)
    rows = _inputs(x, live, start, 32, K, CHECKED)
    return acc + tl.dot(values.to(rows.dtype), rows, input_precision="ieee") * scale[:, :, None]


@triton.jit
def _add_half(
    acc: tl.tensor,
    x: tl.tensor,
    live: tl.tensor,
    words: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    second: tl.tensor,  # the scale of the last 16
    more: tl.tensor,
    start: tl.tensor,
    HALF: tl.constexpr,
    STORED: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tensor:
    """Products of 32 of each 64 values, from `start` on."""
    rows0 = _inputs(x, live, start, 16, K, CHECKED)
    rows1 = _inputs(x, live, start + 16, 16, K, CHECKED)
    codes0 = _operand(pairs_of(words, high, 2 * HALF, STORED), rows0, STORED)
    codes1 = _operand(pairs_of(words, high, 2 * HALF + 1, STORED), rows1, STORED)
    products = tl.dot(codes0, rows0, input_precision="ieee")
    if STORED == "Q6_K":
        acc += products * scale[:, :, None]
        acc += tl.dot(codes1, rows1, input_precision="ieee") * second[:, :, None]
    else:
        acc += tl.dot(codes1, rows1, products, input_precision="ieee") * scale[:, :, None]
    if STORED == "Q4_1" or STORED == "Q5_1" or STORED == "Q4_K" or STORED == "Q5_K":
        # Made as codes are, so that both products take the same layout of rows.
        half = tl.full(words.shape, 1.0, rows0.dtype)
        ones = tl.reshape(tl.join(half, half), codes0.shape)
        sums = tl.dot(ones, rows1, tl.dot(ones, rows0, input_precision="ieee"), input_precision="ieee")
        acc += sums * more[:, :, None]
    return acc


@triton.jit
def _inputs(
    x: tl.tensor, live: tl.tensor, start: tl.tensor, SIZE: tl.constexpr, K: tl.constexpr, CHECKED: tl.constexpr
) -> tl.tensor:
    """[groups, SIZE, M]."""
    column = start[:, None, None] + tl.arange(0, SIZE)[None, :, None]
    if CHECKED:
        return tl.load(x[None, None, :] + column, mask=live[None, None, :] & (column < K), other=0.0)
    else:
        return tl.load(x[None, None, :] + column, mask=live[None, None, :], other=0.0)


@triton.jit
def _operand(pairs: tl.tensor, rows: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    """What pairs of codes stand for, before it is scaled: [groups, BLOCK_N, 16] in the dtype of rows, and exact."""
    zero: tl.constexpr = 8 if STORED == "Q4_0" else 16 if STORED == "Q5_0" else 32 if STORED == "Q6_K" else 0
    if STORED == "IQ4_NL":
        both = tl.join(iq4_value(pairs & 63).to(rows.dtype), iq4_value(pairs >> 16).to(rows.dtype))
    elif rows.dtype == tl.bfloat16:
        wide = pairs | 0x43004300
        low = (wide & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True) - (128.0 + zero)
        both = tl.join(low, (wide >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True) - (128.0 + zero))
    else:
        wide = pairs | 0x64006400
        low = (wide & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True) - (1024.0 + zero)
        upper = (wide >> 16).to(tl.uint16).to(tl.float16, bitcast=True) - (1024.0 + zero)
        both = tl.join(low, upper).to(rows.dtype)
    return tl.reshape(both, (pairs.shape[0], pairs.shape[1], 16))
