"""What the GPU does for a mixture of experts: the bodies of `moe`, which launches them.

Each token has a few *pairs*, of itself and an expert that it chose. Few tokens: `gate_up_rows` and `down_rows` take
each pair for itself, and the sum over a token's experts is made where their outputs are. Many: `count` and `place`
sort the pairs by expert and cut those of each expert in *tiles* of rows, all on the device; `gate_up_tiles` and
`down_tiles` multiply them, and `combine` sums over the experts of a token. Nothing is summed by atomics, and whatever
else is in the ubatch, a pair's sums are over the same parts of its inputs in the same order.

Products of a tile with plain weights are transposed, W x^T, so that a tile of 16 rows is enough for tensor cores. With
packed ones they are not: values that were made in registers must not be what is multiplied from there, since Triton 3.6
writes the next ones over those that tensor cores still read.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_tiles import load_tile


@triton.jit
def _weights(
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    expert: tl.tensor,  # one, or that of each row
    n: tl.tensor,
    k: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Inputs [k, k + STEP) of the rows n of an expert's weight, [rows, STEP]: as they are, or float32 if unpacked."""
    if STORED == "dense":
        row = n.to(tl.int64) + tl.cast(expert, tl.int64) * N
        values = tl.load(w0 + row[:, None] * K + (k + tl.arange(0, STEP))[None, :])
    else:
        values = load_tile(w0, w1, w2, w3, expert, n, k, STORED, N, K, STEP, BLOCK_ROWS, BLOCK_COLUMNS)
    return values


@triton.jit
def _act(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _add(total: tl.tensor, weights: tl.tensor, values: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    """A tile of weights [PART, STEP] multiplied with rows [ROWS, STEP]: [PART, ROWS] if plain, else [ROWS, PART]."""
    if STORED == "dense":
        return tl.dot(weights, tl.trans(values), total, input_precision="tf32x3")
    else:
        return tl.dot(values, tl.trans(weights.to(values.dtype)), total, input_precision="tf32x3")


@triton.jit
def _by_row(found: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    """What `_add` summed, as [ROWS, PART]."""
    if STORED == "dense":
        return tl.trans(found)
    else:
        return found


@triton.jit
def gate_up_rows(
    x: tl.tensor,  # [tokens, HIDDEN]
    chosen: tl.tensor,  # [pairs]
    weights: tl.tensor,  # float32 [pairs]
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    inner: tl.tensor,  # [pairs, WIDTH]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    STORED: tl.constexpr,  # the type of packed weights, or "dense"
    BLOCK_ROWS: tl.constexpr,  # of an fp8 weight's blocks
    BLOCK_COLUMNS: tl.constexpr,
    PART: tl.constexpr,  # outputs of a program
    STEP: tl.constexpr,  # inputs of a step; divides them
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """silu(gate) * up * weight of one pair and some of the expert's width."""
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    weight = tl.load(weights + pair)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    # Rows beyond the end are the last one again, and not stored.
    n = tl.minimum(row, WIDTH - 1)
    x += (pair // SLOTS).to(tl.int64) * HIDDEN
    gate, up = tl.zeros((PART, STEP), tl.float32), tl.zeros((PART, STEP), tl.float32)
    for k in tl.range(0, HIDDEN, STEP, num_stages=STAGES, loop_unroll_factor=UNROLL):
        values = tl.load(x + k + tl.arange(0, STEP)).to(tl.float32)[None, :]
        of_gate = _weights(w0, w1, w2, w3, expert, n, k, STORED, 2 * WIDTH, HIDDEN, STEP, BLOCK_ROWS, BLOCK_COLUMNS)
        of_up = _weights(
            w0, w1, w2, w3, expert, n + WIDTH, k, STORED, 2 * WIDTH, HIDDEN, STEP, BLOCK_ROWS, BLOCK_COLUMNS
        )
        gate += of_gate.to(tl.float32) * values
        up += of_up.to(tl.float32) * values
    found = _act(tl.sum(gate, 1), tl.sum(up, 1)) * weight
    tl.store(inner + pair.to(tl.int64) * WIDTH + row, found.to(inner.dtype.element_ty), mask=row < WIDTH)


@triton.jit
def down_rows(
    inner: tl.tensor,  # [pairs, WIDTH]
    chosen: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    out: tl.tensor,  # float32 [tokens, HIDDEN]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    TOGETHER: tl.constexpr,  # slots of a step; divides them
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """The sum over a token's experts of some of their outputs. Rows of a tile are of several slots, in turns."""
    token = tl.program_id(1)
    each = tl.arange(0, PART * TOGETHER)
    row = tl.program_id(0) * PART + each // TOGETHER
    n = tl.minimum(row, HIDDEN - 1)
    chosen += token * SLOTS + each % TOGETHER
    inner += token.to(tl.int64) * (SLOTS * WIDTH)
    inner_rows = inner + (each % TOGETHER * WIDTH)[:, None] + tl.arange(0, STEP)[None, :]
    found = tl.zeros((PART * TOGETHER, STEP), tl.float32)
    for slot in tl.range(0, SLOTS, TOGETHER, num_stages=STAGES, loop_unroll_factor=UNROLL):
        expert = tl.load(chosen + slot)
        for k in tl.static_range(0, WIDTH, STEP):
            values = tl.load(inner_rows + slot * WIDTH + k).to(tl.float32)
            of_down = _weights(w0, w1, w2, w3, expert, n, k, STORED, HIDDEN, WIDTH, STEP, BLOCK_ROWS, BLOCK_COLUMNS)
            found += of_down.to(tl.float32) * values
    total = tl.sum(tl.reshape(tl.sum(found, 1), (PART, TOGETHER)), 1)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    tl.store(out + token.to(tl.int64) * HIDDEN + row, total, mask=row < HIDDEN)


@triton.jit(do_not_specialize=["pairs"])
def count(chosen: tl.tensor, counts: tl.tensor, pairs: tl.tensor, BLOCK: tl.constexpr) -> None:
    """How many pairs are of the program's expert."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, pairs, BLOCK):
        pair = at + tl.arange(0, BLOCK)
        found += (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs"])
def place(
    chosen: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,  # int32 [pairs]: the pairs by expert, those of one as they come
    tiles: tl.tensor,  # int32 [most tiles, 3]: the expert, and which places of `order` are the tile's: from, to
    total: tl.tensor,  # int32 [1]: tiles that there are
    pairs: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # experts, as a power of two
    ROWS: tl.constexpr,  # of a tile
    BLOCK: tl.constexpr,
) -> None:
    """The pairs and tiles of the program's expert, put in their places."""
    expert = tl.program_id(0)
    each = tl.arange(0, PADDED)
    before = tl.load(counts + each, mask=each < expert, other=0)
    first = tl.sum(before, 0)
    tile = tl.sum((before + (ROWS - 1)) // ROWS, 0)
    stop = first + tl.load(counts + expert)
    for at in range(first, stop, ROWS):
        tl.store(tiles + tile * 3, expert)
        tl.store(tiles + tile * 3 + 1, at)
        tl.store(tiles + tile * 3 + 2, tl.minimum(at + ROWS, stop))
        tile += 1
    if expert == EXPERTS - 1:
        tl.store(total, tile)
    for at in range(0, tl.where(stop > first, pairs, 0), BLOCK):
        pair = at + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(mine, 0) - 1, pair, mask=mine != 0)
        first += tl.sum(mine, 0)


@triton.jit
def gate_up_tiles(
    x: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    weights: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    inner: tl.tensor,  # [pairs, WIDTH], as in `order`
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """silu(gate) * up * weight of a tile of pairs and some of their expert's width."""
    if tl.program_id(1) >= tl.load(total):
        return
    tiles += tl.program_id(1) * 3
    expert, stop = tl.load(tiles), tl.load(tiles + 2)
    at = tl.load(tiles + 1) + tl.arange(0, ROWS)
    pair = tl.load(order + tl.minimum(at, stop - 1))
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    n = tl.minimum(row, WIDTH - 1)
    x_rows = x + (pair // SLOTS).to(tl.int64)[:, None] * HIDDEN + tl.arange(0, STEP)[None, :]
    gate = tl.zeros((PART, ROWS) if STORED == "dense" else (ROWS, PART), tl.float32)
    up = gate
    for k in range(0, HIDDEN, STEP):
        values = tl.load(x_rows + k)
        of_gate = _weights(w0, w1, w2, w3, expert, n, k, STORED, 2 * WIDTH, HIDDEN, STEP, BLOCK_ROWS, BLOCK_COLUMNS)
        of_up = _weights(
            w0, w1, w2, w3, expert, n + WIDTH, k, STORED, 2 * WIDTH, HIDDEN, STEP, BLOCK_ROWS, BLOCK_COLUMNS
        )
        gate, up = _add(gate, of_gate, values, STORED), _add(up, of_up, values, STORED)
    found = _by_row(_act(gate, up), STORED) * tl.load(weights + pair)[:, None]
    live = (at < stop)[:, None] & (row < WIDTH)[None, :]
    place_out = at.to(tl.int64)[:, None] * WIDTH + row[None, :]
    tl.store(inner + place_out, found.to(inner.dtype.element_ty), mask=live)


@triton.jit
def down_tiles(
    inner: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    parts: tl.tensor,  # [pairs, HIDDEN], as pairs come
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Some of the outputs of a tile of pairs."""
    if tl.program_id(1) >= tl.load(total):
        return
    tiles += tl.program_id(1) * 3
    expert, stop = tl.load(tiles), tl.load(tiles + 2)
    at = tl.load(tiles + 1) + tl.arange(0, ROWS)
    some = tl.minimum(at, stop - 1)
    pair = tl.load(order + some)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    n = tl.minimum(row, HIDDEN - 1)
    inner_rows = inner + some.to(tl.int64)[:, None] * WIDTH + tl.arange(0, STEP)[None, :]
    found = tl.zeros((PART, ROWS) if STORED == "dense" else (ROWS, PART), tl.float32)
    for k in range(0, WIDTH, STEP):
        values = tl.load(inner_rows + k)
        of_down = _weights(w0, w1, w2, w3, expert, n, k, STORED, HIDDEN, WIDTH, STEP, BLOCK_ROWS, BLOCK_COLUMNS)
        found = _add(found, of_down, values, STORED)
    live = (at < stop)[:, None] & (row < HIDDEN)[None, :]
    place_out = pair.to(tl.int64)[:, None] * HIDDEN + row[None, :]
    tl.store(parts + place_out, _by_row(found, STORED).to(parts.dtype.element_ty), mask=live)


@triton.jit
def combine(
    parts: tl.tensor,
    out: tl.tensor,  # float32 [tokens, HIDDEN]
    HIDDEN: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """The sum over a token's pairs, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    parts += token * (SLOTS * HIDDEN) + column
    found = tl.zeros((PART,), tl.float32)
    for slot in tl.static_range(SLOTS):
        found += tl.load(parts + slot * HIDDEN, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, found, mask=column < HIDDEN)
