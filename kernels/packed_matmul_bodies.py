"""What the GPU does with quantised weights: the bodies of `packed_matmul`, which launches them."""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_products import add_products, load_scales
from lazyio.kernels.packed_tiles import load_tile
from lazyio.kernels.packed_vectors import row_products


@triton.jit
def expand(
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    out: tl.tensor,  # [experts, N, K]
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """A tile of the weight as values."""
    expert = tl.program_id(0) // ((N + BLOCK_N - 1) // BLOCK_N)
    n = tl.program_id(0) % ((N + BLOCK_N - 1) // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K
    row, column = tl.minimum(n, N - 1), k + tl.arange(0, BLOCK_K)
    values = load_tile(p0, p1, p2, p3, expert, row, k, STORED, N, K, BLOCK_K, ROWS, COLUMNS)
    place = (expert.to(tl.int64) * N + row)[:, None] * K + column[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=(n < N)[:, None] & (column < K)[None, :])


@triton.jit(do_not_specialize=["rows"])
def narrow(
    x: tl.tensor,  # [rows, K]
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    out: tl.tensor,  # [rows, N]
    rows: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Some outputs of some rows, with all inputs. Programs with the same codes follow on each other."""
    pieces = (rows + BLOCK_M - 1) // BLOCK_M
    n = tl.program_id(0) // pieces * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) % pieces * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(n, N - 1)
    acc = tl.zeros((BLOCK_K // 64, BLOCK_N, BLOCK_M), tl.float32)
    scales, units = load_scales(p2, p3, 0, row, 0, STORED, N, K, BLOCK_K, ROWS, COLUMNS)
    last: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    for k in range(0, K, BLOCK_K):
        following = tl.minimum(k + BLOCK_K, last)
        scales_then, units_then = load_scales(p2, p3, 0, row, following, STORED, N, K, BLOCK_K, ROWS, COLUMNS)
        acc = add_products(acc, x + m * K, m < rows, p0, p1, scales, units, 0, row, k, STORED, N, K, BLOCK_K)
        scales, units = scales_then, units_then
    place = out + m[None, :] * N + n[:, None]
    tl.store(place, tl.sum(acc, 0).to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < rows)[None, :])


@triton.jit
def single(
    x: tl.tensor,  # [1, K]
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    out: tl.tensor,  # [1, N]
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Some outputs of one row, with all inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    (found,) = row_products(x, (0,), p0, p1, p2, p3, 0, row, STORED, N, K, ROWS, COLUMNS, 1, PIECES, UNROLL, False)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n < N)
