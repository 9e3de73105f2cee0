"""What the GPU does to norm and rotate heads: the body of `norm_rotate`, which launches it."""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit(do_not_specialize=["rows"])
def turn(
    x: tl.tensor,
    weight: tl.tensor,  # [DIM]
    cos: tl.tensor,  # [tokens, HALF]
    sin: tl.tensor,
    out: tl.tensor,  # [tokens, HEADS, DIM]
    rows: tl.tensor,  # heads of all tokens
    eps: tl.tensor,
    offset: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,  # elements
    HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Some heads, a row each. A dimension is read with the one that it is turned with."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    dim = tl.arange(0, DIM)
    other = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
    x += (token * TOKEN_STRIDE + head * HEAD_STRIDE)[:, None]
    ours = tl.load(x + dim[None, :], mask=live, other=0.0).to(tl.float32)
    theirs = tl.load(x + other[None, :], mask=live, other=0.0).to(tl.float32)
    length = 1.0 / tl.sqrt(tl.sum(ours * ours, 1) / DIM + eps)
    # Rounded as the norm alone would be.
    dtype: tl.constexpr = out.dtype.element_ty
    ours = (ours * length[:, None] * (tl.load(weight + dim).to(tl.float32) + offset)[None, :]).to(dtype)
    theirs = (theirs * length[:, None] * (tl.load(weight + other).to(tl.float32) + offset)[None, :]).to(dtype)
    turned = live & (dim < 2 * HALF)[None, :]
    angle = token[:, None] * HALF + (dim % HALF)[None, :]
    of_cos = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    of_sin = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    of_sin = tl.where(dim < HALF, -1.0, 1.0)[None, :] * of_sin
    found = ours.to(tl.float32) * of_cos + theirs.to(tl.float32) * of_sin
    tl.store(out + row.to(tl.int64)[:, None] * DIM + dim[None, :], found.to(dtype), mask=live)
