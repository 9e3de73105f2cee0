"""What the GPU does for a mixture of experts whose weights are packed, for few rows of each expert.

The bodies are those of moe_bodies.py whose names they have, pairs one by one or tiles of up to 16 rows; and those with
`few` in their names, for tiles of up to 4. Codes are multiplied as they are: see packed_products.py for tiles of 16,
packed_vectors.py for the others. Rows of gate and up lie in turns here, so that one product makes both.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types;
# tuples grow by what is added to them, which is what it takes.
# ruff: noqa: N803, RUF005
# mypy: disable-error-code="untyped-decorator,assignment"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lazyio.kernels import packed_products
from lazyio.kernels.packed_products import load_scales
from lazyio.kernels.packed_vectors import row_products


@triton.jit
def _products(
    x: tl.tensor,  # [rows]: pointers to the first input of each
    live: tl.tensor,  # [rows]
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Of rows n of an expert's weight with rows of x: float32 [n, rows], 0 for rows that are not live."""
    found = tl.zeros((STEP // 64, n.shape[0], x.shape[0]), tl.float32)
    scales, units = load_scales(w2, w3, expert, n, 0, STORED, N, K, STEP, BLOCK_ROWS, BLOCK_COLUMNS)
    last: tl.constexpr = (K - 1) // STEP * STEP
    for k in range(0, K, STEP):
        following = tl.minimum(k + STEP, last)
        scales_then, units_then = load_scales(
            w2, w3, expert, n, following, STORED, N, K, STEP, BLOCK_ROWS, BLOCK_COLUMNS
        )
        found = packed_products.add_products(found, x, live, w0, w1, scales, units, expert, n, k, STORED, N, K, STEP)
        scales, units = scales_then, units_then
    return tl.sum(found, 0)


@triton.jit
def _act(both: tl.tensor) -> tl.tensor:
    """silu(gate) * up, of rows in turns: [2 n, rows] to [n, rows]."""
    rows: tl.constexpr = both.shape[1]
    gate, up = tl.split(tl.permute(tl.reshape(both, (both.shape[0] // 2, 2, rows)), (0, 2, 1)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_up_rows(
    x: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    inner: tl.tensor,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PIECES: tl.constexpr,  # of a row, at once
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,  # both begin before the launch before them ends, and down_rows loads weights before it waits
) -> None:
    """silu(gate) * up * weight of one pair."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # not before: down_rows reads which experts are chosen, and waits for this launch alone
    pair = tl.program_id(1)
    expert, scale = tl.load(chosen + pair), tl.load(weights + pair)
    each = tl.arange(0, 2 * PART)
    n = tl.minimum(tl.program_id(0) * PART + each // 2, WIDTH - 1) + each % 2 * WIDTH
    (both,) = row_products(
        *(x, ((pair // SLOTS).to(tl.int64) * HIDDEN,), w0, w1, w2, w3, expert, n, STORED, 2 * WIDTH, HIDDEN),
        *(BLOCK_ROWS, BLOCK_COLUMNS, 1, PIECES, UNROLL, False),
    )
    found = tl.sum(_act(both[:, None]), 1) * scale
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    tl.store(inner + pair.to(tl.int64) * WIDTH + row, found.to(inner.dtype.element_ty), mask=row < WIDTH)


@triton.jit
def down_rows(
    inner: tl.tensor,
    chosen: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    out: tl.tensor,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The sum over a token's experts of some of their outputs: a row of all of its experts is taken as one."""
    token = tl.program_id(1)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    n = tl.minimum(row, HIDDEN - 1)
    experts = chosen + token * SLOTS
    if SLOTS == 1:
        experts = tl.load(experts)
    (total,) = row_products(
        *(inner, (token.to(tl.int64) * (SLOTS * WIDTH),), w0, w1, w2, w3, experts, n),
        *(STORED, HIDDEN, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS, SLOTS, PIECES, UNROLL, OVERLAP),
    )
    tl.store(out + token.to(tl.int64) * HIDDEN + row, total, mask=row < HIDDEN)


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
    inner: tl.tensor,
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
    at, each = tl.load(tiles + 1) + tl.arange(0, ROWS), tl.arange(0, 2 * PART)
    pair = tl.load(order + tl.minimum(at, stop - 1))
    n = tl.minimum(tl.program_id(0) * PART + each // 2, WIDTH - 1) + each % 2 * WIDTH
    x_rows = x + (pair // SLOTS).to(tl.int64) * HIDDEN
    both = _products(
        x_rows, at < stop, w0, w1, w2, w3, expert, n, STORED, 2 * WIDTH, HIDDEN, STEP, BLOCK_ROWS, BLOCK_COLUMNS
    )
    found = tl.trans(_act(both) * tl.load(weights + pair)[None, :])
    row = tl.program_id(0) * PART + tl.arange(0, PART)
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
    parts: tl.tensor,
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
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    n = tl.minimum(row, HIDDEN - 1)
    some = tl.minimum(at, stop - 1)
    found = _products(
        inner + some.to(tl.int64) * WIDTH,
        at < stop,
        w0,
        w1,
        w2,
        w3,
        expert,
        n,
        STORED,
        HIDDEN,
        WIDTH,
        STEP,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    live = (at < stop)[:, None] & (row < HIDDEN)[None, :]
    place_out = tl.load(order + some).to(tl.int64)[:, None] * HIDDEN + row[None, :]
    tl.store(parts + place_out, tl.trans(found).to(parts.dtype.element_ty), mask=live)


@triton.jit
def gate_up_few(
    x: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    weights: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    inner: tl.tensor,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """As `gate_up_tiles`, of tiles of up to 4 rows without tensor cores: most are of one or two, so each is a way."""
    if tl.program_id(1) >= tl.load(total):
        return
    tiles += tl.program_id(1) * 3
    expert, first, stop = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
    each, row = tl.arange(0, 2 * PART), tl.program_id(0) * PART + tl.arange(0, PART)
    n = tl.minimum(tl.program_id(0) * PART + each // 2, WIDTH - 1) + each % 2 * WIDTH
    for power in tl.static_range(3):
        if tl.minimum(stop - first - 1, 2) == power:
            _gate_up_few(
                *(x, order, weights, w0, w1, w2, w3, inner, expert, first, stop, n, row, HIDDEN, WIDTH, SLOTS, STORED),
                *(BLOCK_ROWS, BLOCK_COLUMNS, 1 << power, PIECES, UNROLL),
            )


@triton.jit
def _gate_up_few(
    x: tl.tensor,
    order: tl.tensor,
    weights: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    inner: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    n: tl.tensor,
    row: tl.tensor,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    M: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    at, scales = (), ()
    for m in tl.static_range(M):
        pair = tl.load(order + tl.minimum(first + m, stop - 1))
        at, scales = at + ((pair // SLOTS).to(tl.int64) * HIDDEN,), scales + (tl.load(weights + pair),)
    both = row_products(
        *(x, at, w0, w1, w2, w3, expert, n, STORED, 2 * WIDTH, HIDDEN, BLOCK_ROWS, BLOCK_COLUMNS),
        *(1, PIECES, UNROLL, False),
    )
    for m in tl.static_range(M):
        found = tl.sum(_act(both[m][:, None]), 1) * scales[m]
        place = inner + (first + m).to(tl.int64) * WIDTH + row
        tl.store(place, found.to(inner.dtype.element_ty), mask=row < tl.where(first + m < stop, WIDTH, 0))


@triton.jit
def down_few(
    inner: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    parts: tl.tensor,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """As `down_tiles`, of tiles of up to 4 rows."""
    if tl.program_id(1) >= tl.load(total):
        return
    tiles += tl.program_id(1) * 3
    expert, first, stop = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    for power in tl.static_range(3):
        if tl.minimum(stop - first - 1, 2) == power:
            _down_few(
                *(inner, order, w0, w1, w2, w3, parts, expert, first, stop, row, HIDDEN, WIDTH, STORED),
                *(BLOCK_ROWS, BLOCK_COLUMNS, 1 << power, PIECES, UNROLL),
            )


@triton.jit
def _down_few(
    inner: tl.tensor,
    order: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    parts: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    row: tl.tensor,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    M: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    at = ()
    for m in tl.static_range(M):
        at = at + (tl.minimum(first + m, stop - 1).to(tl.int64) * WIDTH,)
    found = row_products(
        *(inner, at, w0, w1, w2, w3, expert, tl.minimum(row, HIDDEN - 1), STORED, HIDDEN, WIDTH),
        *(BLOCK_ROWS, BLOCK_COLUMNS, 1, PIECES, UNROLL, False),
    )
    for m in tl.static_range(M):
        pair = tl.load(order + tl.minimum(first + m, stop - 1)).to(tl.int64)
        place = parts + pair * HIDDEN + row
        tl.store(place, found[m].to(parts.dtype.element_ty), mask=row < tl.where(first + m < stop, HIDDEN, 0))
