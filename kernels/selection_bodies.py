"""What the GPU does to select blocks of keys: the bodies of `select_blocks`, which launches them.

`score` gives each query a score for each block it may see, `choose` finds the best of a query's, `unite` lists the
blocks that any of some queries in a row has chosen. Source of the rule: see engine/layers/block_selection.py.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.page_bodies import page_of, pages_of, rows_of, table_of


@triton.jit(do_not_specialize=["tokens", "before"])
def score(
    queries: tl.tensor,  # [tokens, HEADS, DIM]
    keys: tl.tensor,  # [blocks, DIM], or that of each page
    table: tl.tensor,  # int64 [pages], where PAGE
    scores: tl.tensor,  # float32 [tokens, width]
    positions: tl.tensor,  # int64 [tokens], where STEPS
    places: tl.tensor,  # int64 [tokens], where STEPS: of keys, or where PAGE of tables, in units of 16 bytes from these
    tokens: tl.tensor,
    before: tl.tensor,  # tokens of the sequence before the first of these
    width: tl.tensor,
    STEPS: tl.constexpr,  # whether tokens are of a sequence each
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr,  # dtype that they are multiplied in
    UNIT: tl.constexpr,  # elements of 16 bytes
    PAGE: tl.constexpr,  # blocks of a page, of which COLUMNS are a part or a multiple; 0 where keys are a window
    PAGE_STRIDE: tl.constexpr,
) -> None:
    """Of some queries and blocks: the sum over heads, in order, of relu(q . k). What no query sees is left as it is."""
    first, count = tl.program_id(1) * ROWS, ROWS
    if STEPS:
        first, count = tl.program_id(1), 1
        before = tl.load(positions + first).to(tl.int32) - first
        if PAGE:
            table = table_of(table, places, first)
        else:
            keys += tl.load(places + first) * UNIT
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    tokens = tl.minimum(first + count, tokens)
    blocks = (before + tokens) // RATIO
    if tl.program_id(0) * COLUMNS < blocks:
        dim, page = tl.arange(0, DIM), 0
        if PAGE:
            page = _page_of(table, tl.program_id(0) * COLUMNS, blocks, COLUMNS, PAGE)
        lie = rows_of(keys, page, column, DIM, PAGE, PAGE_STRIDE) + dim[None, :]
        of_blocks = tl.load(lie, mask=column[:, None] < blocks, other=0.0)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for head in range(HEADS):
            place = queries + row[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
            of_queries = tl.load(place, mask=row[:, None] < tokens, other=0.0)
            found = tl.dot(of_queries.to(OPERAND), tl.trans(of_blocks.to(OPERAND)), input_precision="tf32x3")
            total += tl.maximum(found, 0.0)
        inside = (row[:, None] < tokens) & (column[None, :] < blocks)
        tl.store(scores + row[:, None] * width + column[None, :], total, mask=inside)


@triton.jit
def _page_of(
    table: tl.tensor, first: tl.tensor, blocks: tl.tensor, COLUMNS: tl.constexpr, PAGE: tl.constexpr
) -> tl.tensor:
    """The page of blocks in a row from the `first`, which is there; [COLUMNS, 1] where a page has fewer."""
    if COLUMNS <= PAGE:
        page = page_of(table, first, PAGE)
    else:
        begins = first + tl.arange(0, COLUMNS // PAGE) * PAGE
        page = pages_of(table, tl.minimum(begins, blocks - 1), PAGE, PAGE)
    return page


@triton.jit(do_not_specialize=["before", "count"])
def choose(
    scores: tl.tensor,  # float32 [tokens, width]
    chosen: tl.tensor,  # int8 [tokens, width], unless LISTS
    entries: tl.tensor,  # int32 [tokens, capacity], where LISTS: those of a list for each token
    counts: tl.tensor,  # int32 [tokens]
    positions: tl.tensor,  # int64 [tokens], where STEPS
    before: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    capacity: tl.tensor,
    STEPS: tl.constexpr,
    LISTS: tl.constexpr,
    RATIO: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,  # a power of 2, no less than the columns
) -> None:
    """Which blocks a query sees: the best of the complete ones, and the one that it lies in if that isn't complete."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    length = (tl.load(positions + token).to(tl.int32) if STEPS else before + tl.program_id(0)) + 1
    complete = length // RATIO
    visible = column < complete
    found = tl.load(scores + token * width + column, mask=visible, other=0.0)
    # Floats that are not negative have the order of their bits as integers.
    bits = tl.where(found > 0.0, found, 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(visible, bits, -1)
    lowest = tl.full((), 0, tl.int32)  # of the best: as high as leaves enough that are as high
    step = tl.full((), 1 << 30, tl.int32)
    while step > 0:
        enough = tl.sum((bits >= lowest + step).to(tl.int32), 0)
        lowest = tl.where(enough >= count, lowest + step, lowest)
        step = tl.where(enough == count, 0, step // 2)
    best = bits >= lowest
    if tl.sum(best.to(tl.int32), 0) > count:  # of those with the lowest score, the first that there is room for
        above, equal = bits > lowest, bits == lowest
        room = count - tl.sum(above.to(tl.int32), 0)
        best = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    tail = (column == complete) & (length % RATIO != 0)
    if LISTS:
        _list((best | tail).to(tl.int32), column, entries + token * capacity, counts + token, BITS)
    else:
        tl.store(chosen + token * width + column, (best | tail).to(tl.int8), mask=column < width)


@triton.jit(do_not_specialize=["tokens", "size"])
def unite(
    chosen: tl.tensor,  # int8 [tokens, width]
    entries: tl.tensor,  # int32 [groups, capacity]
    counts: tl.tensor,  # int32 [groups]
    tokens: tl.tensor,
    width: tl.tensor,
    capacity: tl.tensor,
    size: tl.tensor,  # tokens of a group
    BITS: tl.constexpr,  # of an entry, that say which tokens of the group see the block
    TILE: tl.constexpr,
) -> None:
    """The blocks that any token of a group sees, in ascending order, each with the tokens that do."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    sees = tl.zeros((TILE,), tl.int32)
    for i in range(size):
        token = group * size + i
        columns = tl.where(token < tokens, width, 0)
        sees |= tl.load(chosen + token * width + column, mask=column < columns, other=0).to(tl.int32) << i
    _list(sees, column, entries + group * capacity, counts + group, BITS)


@triton.jit
def _list(sees: tl.tensor, column: tl.tensor, entries: tl.tensor, count: tl.tensor, BITS: tl.constexpr) -> None:
    """Store the entries of what any token sees, and how many they are."""
    seen = sees != 0
    place = tl.cumsum(seen.to(tl.int32), 0) - 1
    tl.store(entries + place, (column << BITS) | sees, mask=seen)
    tl.store(count, tl.sum(seen.to(tl.int32), 0))
