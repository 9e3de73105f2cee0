"""What the GPU does for a table of n-grams in a model: the bodies of `ple_block`, which launches them.

Streams lie side by side in a token's values: [tokens, STREAMS * HIDDEN]. Sums, norms and gates are float32 whatever the
dtype of what is loaded and stored; what torch's code would round, is rounded.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def gate(
    streams: tl.tensor,
    keys: tl.tensor,  # like streams
    values: tl.tensor,  # [tokens, HIDDEN]
    query_weight: tl.tensor,  # [STREAMS * HIDDEN]: of norms, zero-centred
    key_weight: tl.tensor,
    gates: tl.tensor,  # float32 [tokens, STREAMS, 2]: the gate, and what brings the gated values to unit length
    eps: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # HIDDEN, or more
) -> None:
    """How far one token opens one stream to its values."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    within = column < HIDDEN
    channel = stream * HIDDEN + column
    place = token * (STREAMS * HIDDEN) + channel
    query = tl.load(streams + place, mask=within, other=0.0).to(tl.float32)
    key = tl.load(keys + place, mask=within, other=0.0).to(tl.float32)
    value = tl.load(values + token * HIDDEN + column, mask=within, other=0.0).to(tl.float32)
    of_query = 1.0 + tl.load(query_weight + channel, mask=within, other=0.0).to(tl.float32)
    of_key = 1.0 + tl.load(key_weight + channel, mask=within, other=0.0).to(tl.float32)
    lengths = tl.sqrt(tl.sum(query * query, 0) / HIDDEN + eps) * tl.sqrt(tl.sum(key * key, 0) / HIDDEN + eps)
    r = tl.sum(query * of_query * key * of_key, 0) / (lengths * HIDDEN**0.5)
    root = tl.sqrt(tl.maximum(tl.abs(r), 1e-6))
    # The sign of 0 is 0.
    opened = tl.sigmoid(tl.where(r > 0, root, tl.where(r < 0, -root, 0.0))).to(values.dtype.element_ty).to(tl.float32)
    gated = (value * opened).to(values.dtype.element_ty).to(tl.float32)
    unit = 1.0 / tl.sqrt(tl.sum(gated * gated, 0) / HIDDEN + eps)
    tl.store(gates + (token * STREAMS + stream) * 2, opened)
    tl.store(gates + (token * STREAMS + stream) * 2 + 1, unit)


@triton.jit
def convolve(
    values: tl.tensor,
    gates: tl.tensor,
    norm_weight: tl.tensor,  # [STREAMS * HIDDEN], zero-centred
    conv_weight: tl.tensor,  # [STREAMS * HIDDEN, KERNEL]
    blocks: tl.tensor,  # int32 [blocks, 4]: the block's first token; its sequence's tokens from, to; which one that is
    history: tl.tensor,  # [REACH, STREAMS * HIDDEN] of each sequence: the inputs of the last tokens before
    places: tl.tensor,  # int64 [sequences]: where that of each lies, in eights of elements from `history`
    out: tl.tensor,  # [tokens, STREAMS * HIDDEN]
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    REACH: tl.constexpr,  # (KERNEL - 1) * DILATION
    ROWS: tl.constexpr,  # tokens of a block; REACH, or more
    KEPT: tl.constexpr,  # REACH, or more
    WIDTH: tl.constexpr,  # columns of a program
) -> None:
    """What is added to one stream, for some tokens of one sequence and some columns.

    Only the first block of a sequence reaches back to its history, and so that block is the one to write it anew.
    """
    row = blocks + tl.program_id(0) * 4
    token = tl.load(row) + tl.arange(0, ROWS)
    start, stop = tl.load(row + 1), tl.load(row + 2)
    stream, column = tl.program_id(2), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    channel, within = stream * HIDDEN + column, column < HIDDEN
    history += tl.load(places + tl.load(row + 3)) * 8
    gain = 1.0 + tl.load(norm_weight + channel, mask=within, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for k in tl.static_range(KERNEL):
        at = token - (KERNEL - 1 - k) * DILATION
        found = _inputs(values, gates, gain, history, at, start, stop, stream, column, STREAMS, HIDDEN, REACH)
        weight = tl.load(conv_weight + channel * KERNEL + k, mask=within, other=0.0).to(tl.float32)
        total += found * weight[None, :]
    gated = _gated(values, gates, token, token < stop, stream, column, STREAMS, HIDDEN)
    added = (total * tl.sigmoid(total)).to(out.dtype.element_ty).to(tl.float32)
    place = token.to(tl.int64)[:, None] * (STREAMS * HIDDEN) + channel[None, :]
    tl.store(out + place, (gated + added).to(out.dtype.element_ty), mask=(token < stop)[:, None] & within[None, :])
    if tl.load(row) == start:
        kept = tl.arange(0, KEPT)
        last = stop - REACH + kept
        moved = _inputs(values, gates, gain, history, last, start, stop, stream, column, STREAMS, HIDDEN, REACH)
        tl.debug_barrier()  # rows move up: all have been read before one is written
        where = history + kept[:, None] * (STREAMS * HIDDEN) + channel[None, :]
        tl.store(where, moved.to(history.dtype.element_ty), mask=(kept < REACH)[:, None] & within[None, :])


@triton.jit
def _gated(
    values: tl.tensor,
    gates: tl.tensor,
    token: tl.tensor,
    here: tl.tensor,
    stream: tl.tensor,
    column: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
) -> tl.tensor:
    """Values of tokens as their gates let them through, [tokens, columns]; 0 for those not `here`."""
    live = here[:, None] & (column < HIDDEN)[None, :]
    place = token.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    value = tl.load(values + place, mask=live, other=0.0).to(tl.float32)
    opened = tl.load(gates + (token * STREAMS + stream) * 2, mask=here, other=0.0)
    return (value * opened[:, None]).to(values.dtype.element_ty).to(tl.float32)


@triton.jit
def _inputs(
    values: tl.tensor,
    gates: tl.tensor,
    gain: tl.tensor,
    history: tl.tensor,
    at: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    stream: tl.tensor,
    column: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    REACH: tl.constexpr,
) -> tl.tensor:
    """What is convolved, of tokens `at` of a sequence: norms of gated values, those before `start` from its history."""
    here, earlier = (at >= start) & (at < stop), (at < start) & (at >= start - REACH)
    gated = _gated(values, gates, at, here, stream, column, STREAMS, HIDDEN)
    unit = tl.load(gates + (at * STREAMS + stream) * 2 + 1, mask=here, other=0.0)
    normed = (gated * unit[:, None] * gain[None, :]).to(values.dtype.element_ty).to(tl.float32)
    place = (at - start + REACH)[:, None] * (STREAMS * HIDDEN) + (stream * HIDDEN + column)[None, :]
    before = tl.load(history + place, mask=earlier[:, None] & (column < HIDDEN)[None, :], other=0.0).to(tl.float32)
    return tl.where(here[:, None], normed, before)
