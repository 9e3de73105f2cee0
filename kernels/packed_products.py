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

from lazyio.kernels.packed_tiles import iq4_value, loaded_scales, pairs_of, scale_rows, scales_of, words_of


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
    row = scale_rows(expert, n, STORED, N, ROWS)[None, :, None]
    return loaded_scales(p2, p3, row, first, STORED, K, COLUMNS, K % BLOCK_K != 0)


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
    groups, rows = first[:, None, None], row[None, :, None]
    words, high = words_of(p0, p1, rows, groups, 0, STORED, K, checked)
    acc = _add_half(acc, x, live, words, high, s0, s1, more0, first * 64, 0, STORED, K, checked)
    if STORED == "Q8_0" or STORED == "F8_E4M3":
        words, high = words_of(p0, p1, rows, groups, 1, STORED, K, checked)
    return _add_half(acc, x, live, words, high, s2, s3, more1, first * 64 + 32, 1, STORED, K, checked)


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
        # What codes have too much is taken off with the least values. float32 has no room for it.
        more -= scale * (0 if rows0.dtype == tl.float32 else 128 if rows0.dtype == tl.bfloat16 else 1024)
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
    with_sums: tl.constexpr = STORED == "Q4_1" or STORED == "Q5_1" or STORED == "Q4_K" or STORED == "Q5_K"
    if STORED == "IQ4_NL":
        both = tl.join(iq4_value(pairs & 0xFFFF).to(rows.dtype), iq4_value(pairs >> 16).to(rows.dtype))
    elif rows.dtype == tl.bfloat16:
        if STORED == "Q8_0":
            # 128 + 7 bits, less 128 or, where the sign bit is set, 256.
            low, upper = _halves(pairs & 0x007F007F | 0x43004300, tl.bfloat16)
            less_low, less_upper = _halves(pairs & 0x00800080 | 0x43004300, tl.bfloat16)
            both = tl.join(low - less_low, upper - less_upper)
        elif STORED == "F8_E4M3":
            low, upper = _halves((pairs & 0x007F007F) << 4 | (pairs & 0x00800080) << 8, tl.bfloat16)
            both = tl.join(low * 1.329227995784916e36, upper * 1.329227995784916e36)  # 2 ** 120
        else:
            low, upper = _halves(pairs | 0x43004300, tl.bfloat16)
            if not with_sums:
                low, upper = low - (128.0 + zero), upper - (128.0 + zero)
            both = tl.join(low, upper)
    else:
        if STORED == "Q8_0":
            low, upper = _halves(pairs ^ 0x00800080 | 0x64006400, tl.float16)
            both = tl.join(low - 1152.0, upper - 1152.0)
        elif STORED == "F8_E4M3":
            low, upper = _halves((pairs & 0x007F007F) << 7 | (pairs & 0x00800080) << 8, tl.float16)
            both = tl.join(low * 256.0, upper * 256.0)
        else:
            low, upper = _halves(pairs | 0x64006400, tl.float16)
            if not with_sums or rows.dtype == tl.float32:
                low, upper = low - (1024.0 + zero), upper - (1024.0 + zero)
            both = tl.join(low, upper)
    return tl.reshape(both.to(rows.dtype), (pairs.shape[0], pairs.shape[1], 16))


@triton.jit
def _halves(words: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The floats of 2 bytes in both halves of words."""
    low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return low, (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
