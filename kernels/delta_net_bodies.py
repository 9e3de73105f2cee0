"""What the GPU does around the delta rule: the bodies of `delta_net`, which launches them.

All are float32 inside, whatever the dtype of what is loaded and stored; what torch's code would round, is rounded.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def convolve(
    inputs: tl.tensor,  # [tokens, CHANNELS]
    weight: tl.tensor,  # [CHANNELS, REACH + 1]
    blocks: tl.tensor,  # int32 [blocks, 4]: the block's first token; its sequence's tokens from, to; which one that is
    history: tl.tensor,  # [REACH, CHANNELS] of each sequence: the inputs of the last tokens before
    places: tl.tensor,  # int64 [sequences]: where that of each lies, in eights of elements from `history`
    out: tl.tensor,  # like inputs
    CHANNELS: tl.constexpr,
    REACH: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a block; REACH, or more
    KEPT: tl.constexpr,  # REACH, or more
    WIDTH: tl.constexpr,  # channels of a program
) -> None:
    """The activated convolution of some tokens of one sequence and some channels.

    Only the first block of a sequence reaches back to its history, and so that block is the one to write it anew.
    """
    row = blocks + tl.program_id(0) * 4
    first, start, stop = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    token, channel = first + tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = channel < CHANNELS
    history += tl.load(places + tl.load(row + 3)) * 8
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for tap in tl.static_range(REACH + 1):
        found = _inputs(inputs, history, token - (REACH - tap), start, stop, channel, CHANNELS, REACH)
        of_tap = tl.load(weight + channel * (REACH + 1) + tap, mask=within, other=0.0).to(tl.float32)
        total += found.to(tl.float32) * of_tap[None, :]
    rounded = total.to(out.dtype.element_ty).to(tl.float32)
    activated = (rounded * tl.sigmoid(rounded)).to(out.dtype.element_ty)
    place = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out + place, activated, mask=(token < stop)[:, None] & within[None, :])
    if first == start:
        kept = tl.arange(0, KEPT)
        moved = _inputs(inputs, history, stop - REACH + kept, start, stop, channel, CHANNELS, REACH)
        tl.debug_barrier()  # rows move up: all have been read before one is written
        where = history + kept[:, None] * CHANNELS + channel[None, :]
        tl.store(where, moved, mask=(kept < REACH)[:, None] & within[None, :])


@triton.jit
def _inputs(
    inputs: tl.tensor,
    history: tl.tensor,
    at: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    REACH: tl.constexpr,
) -> tl.tensor:
    """Those of tokens `at` of a sequence, from its history where they lie before `start`."""
    here, earlier = (at >= start) & (at < stop), (at < start) & (at >= start - REACH)
    within = (channel < CHANNELS)[None, :]
    place = at.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    now = tl.load(inputs + place, mask=here[:, None] & within, other=0.0)
    before = (at - start + REACH)[:, None] * CHANNELS + channel[None, :]
    return tl.where(here[:, None], now, tl.load(history + before, mask=earlier[:, None] & within, other=0.0))


@triton.jit(do_not_specialize=["count"])
def rates(
    of_beta: tl.tensor,  # [tokens, HEADS]
    of_decay: tl.tensor,  # [tokens, HEADS]
    log_rate: tl.tensor,  # [HEADS]
    bias: tl.tensor,  # [HEADS]
    beta: tl.tensor,  # float32 [tokens, HEADS]
    log_decay: tl.tensor,  # float32 [tokens, HEADS]
    count: tl.tensor,  # of all tokens and heads
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """How much of each token is written, and how much of what was is kept."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, head = place < count, place % HEADS
    tl.store(beta + place, tl.sigmoid(tl.load(of_beta + place, mask=live, other=0.0).to(tl.float32)), mask=live)
    step = tl.load(of_decay + place, mask=live, other=0.0).to(tl.float32) + tl.load(bias + head).to(tl.float32)
    softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    tl.store(log_decay + place, -tl.exp(tl.load(log_rate + head).to(tl.float32)) * softplus, mask=live)


@triton.jit(do_not_specialize=["count"])
def gated_norm(
    x: tl.tensor,  # [count, DIM]
    z: tl.tensor,  # [count, DIM]
    weight: tl.tensor,  # [DIM]
    out: tl.tensor,  # [count, DIM]
    count: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # DIM, or more
    ROWS: tl.constexpr,
    SILU: tl.constexpr,  # the gate is silu, else sigmoid
) -> None:
    """The norm of some heads of tokens, times the gate."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    within = column < DIM
    live = (row < count)[:, None] & within[None, :]
    place = row.to(tl.int64)[:, None] * DIM + column[None, :]
    values = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt(tl.sum(values * values, 1) / DIM + eps))[:, None]
    of_column = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    scaled = (normed.to(out.dtype.element_ty).to(tl.float32) * of_column[None, :]).to(out.dtype.element_ty)
    gate = tl.load(z + place, mask=live, other=0.0).to(tl.float32)
    opened = gate * tl.sigmoid(gate) if SILU else tl.sigmoid(gate)
    tl.store(out + place, (scaled.to(tl.float32) * opened).to(out.dtype.element_ty), mask=live)
