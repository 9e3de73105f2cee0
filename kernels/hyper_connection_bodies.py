"""What the GPU does for hyper-connections: the bodies of `hyper_connection`, which launches them.

Streams lie side by side in a token's values: [tokens, STREAMS * HIDDEN]. Sums, norms and gates are float32 whatever the
dtype of what is loaded and stored.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit(do_not_specialize=["tokens"])
def connect(
    streams: tl.tensor,
    output: tl.tensor,  # [tokens, HIDDEN]: of a block, to be added
    logits: tl.tensor,  # float32 [tokens, PARTS, STREAMS]: their sums say how much each stream takes of it
    weight: tl.tensor,  # [STREAMS * HIDDEN]: of the norm, zero-centred
    inject: tl.tensor,  # [STREAMS, STREAMS * HIDDEN]
    after: tl.tensor,  # like streams
    normed: tl.tensor,  # like streams
    injected: tl.tensor,  # float32 [tokens, STREAMS, STREAMS]: the logits that come of each stream
    tokens: tl.tensor,
    eps: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # HIDDEN, or more
    ROWS: tl.constexpr,  # tokens of a program
    PARTS: tl.constexpr,  # 0 where there is nothing to add
    NORM: tl.constexpr,
    INJECT: tl.constexpr,
) -> None:
    """One stream of some tokens: what a block gave is added, the sum normed, and its part of the logits found."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stream = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    within = column < HIDDEN
    exists = token < tokens
    live = exists[:, None] & within[None, :]
    place = token.to(tl.int64)[:, None] * (STREAMS * HIDDEN) + (stream * HIDDEN + column)[None, :]
    x = tl.load(streams + place, mask=live, other=0.0).to(tl.float32)
    if PARTS > 0:
        logit = tl.zeros((ROWS,), tl.float32)
        for part in tl.static_range(PARTS):
            logit += tl.load(logits + (token * PARTS + part) * STREAMS + stream, mask=exists, other=0.0)
        taken = 2.0 * tl.sigmoid(logit / STREAMS)
        of_block = token.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        y = tl.load(output + of_block, mask=live, other=0.0).to(tl.float32)
        total = (x + taken[:, None] * y).to(after.dtype.element_ty)
        tl.store(after + place, total, mask=live)
        x = total.to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HIDDEN + eps)
        gain = 1.0 + tl.load(weight + stream * HIDDEN + column, mask=within, other=0.0).to(tl.float32)
        u = (x * scale[:, None] * gain[None, :]).to(normed.dtype.element_ty)
        tl.store(normed + place, u, mask=live)
        if INJECT:
            for into in tl.static_range(STREAMS):
                row = inject + (into * STREAMS + stream) * HIDDEN + column
                of_row = tl.load(row, mask=within, other=0.0).to(tl.float32)
                logit = tl.sum(u.to(tl.float32) * of_row[None, :], 1)
                tl.store(injected + (token * STREAMS + stream) * STREAMS + into, logit, mask=exists)


@triton.jit(do_not_specialize=["tokens"])
def mix(
    low: tl.tensor,  # [tokens, RANK]
    up: tl.tensor,  # [STREAMS * HIDDEN, RANK]
    normed: tl.tensor,  # [tokens, STREAMS * HIDDEN]
    out: tl.tensor,  # [tokens, HIDDEN]
    tokens: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    BESIDE: tl.constexpr,  # STREAMS, or more
    ROWS: tl.constexpr,  # tokens of a program
    WIDTH: tl.constexpr,  # its columns of HIDDEN
    PART: tl.constexpr,  # of RANK, multiplied at once
    ACTIVATE: tl.constexpr,  # low comes before its activation
) -> None:
    """The input of a block, for some tokens and columns, which all streams have side by side in one product."""
    # Programs that share columns of `up`, the larger operand of steps, follow on each other.
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    beside = tl.arange(0, BESIDE * WIDTH)
    stream, column = beside // WIDTH, tl.program_id(1) * WIDTH + beside % WIDTH
    within = (stream < STREAMS) & (column < HIDDEN)
    exists = token < tokens
    channel = stream * HIDDEN + column
    # Asked for before the product, these arrive while it is computed.
    place = token.to(tl.int64)[:, None] * (STREAMS * HIDDEN) + channel[None, :]
    u = tl.load(normed + place, mask=exists[:, None] & within[None, :], other=0.0)
    gate = tl.zeros((ROWS, BESIDE * WIDTH), tl.float32)
    low += token.to(tl.int64)[:, None] * RANK
    for at in range(0, RANK, PART):
        rank = at + tl.arange(0, PART)
        has = exists[:, None] & (rank < RANK)[None, :]
        inputs = tl.load(low + rank[None, :], mask=has, other=0.0)
        if ACTIVATE:
            x = inputs.to(tl.float32) * (1 / STREAMS)
            inputs = (x * tl.sigmoid(x)).to(normed.dtype.element_ty)
        of_rank = within[None, :] & (rank < RANK)[:, None]
        weights = tl.load(up + channel[None, :] * RANK + rank[:, None], mask=of_rank, other=0.0)
        gate = tl.dot(inputs, weights, gate, input_precision="ieee")
    opened = tl.sigmoid(gate) * u.to(tl.float32)
    mixed = tl.sum(tl.reshape(opened, (ROWS, BESIDE, WIDTH)), 1) * (1 / STREAMS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    where = token.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(out + where, mixed.to(out.dtype.element_ty), mask=exists[:, None] & (column < HIDDEN)[None, :])


@triton.jit
def blend(
    gate: tl.tensor,  # [tokens, STREAMS * HIDDEN], before the sigmoid
    normed: tl.tensor,  # [tokens, STREAMS * HIDDEN]
    out: tl.tensor,  # [tokens, HIDDEN]
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The input of a block, for a token and some columns, where the gate has been multiplied out."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = column < HIDDEN
    mixed = tl.zeros((WIDTH,), tl.float32)
    for stream in tl.static_range(STREAMS):
        place = (token * STREAMS + stream) * HIDDEN + column
        opened = tl.sigmoid(tl.load(gate + place, mask=within, other=0.0).to(tl.float32))
        mixed += opened * tl.load(normed + place, mask=within, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, (mixed / STREAMS).to(out.dtype.element_ty), mask=within)
