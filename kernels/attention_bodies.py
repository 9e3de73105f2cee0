"""What the GPU does for attention: the bodies of kernels/sparse_attention.py, which launches them.

A program takes some tokens in a row, with all query heads that share a head of keys: the keys that it loads serve them
all. It goes over these keys a tile at a time, with the softmax kept up to date: `most` is the highest score so far in
powers of 2, `total` the sum of the weights, `found` that of the weighted values. Source: Dao et al., FlashAttention.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.block_selection import BITS as _BITS
from lazyio.kernels.page_bodies import of_each, page_of, pages_of, rows_of, table_of

BITS = tl.constexpr(_BITS)


@triton.jit(do_not_specialize=["tokens", "before", "size", "span", "capacity"])
def attend(
    q: tl.tensor,  # [tokens, HEADS, DIM]
    k: tl.tensor,  # [keys, HEADS / EACH, DIM], or that of each page
    v: tl.tensor,
    table: tl.tensor,  # int64 [pages], where PAGE
    entries: tl.tensor,  # int32 [groups, capacity]: the blocks that tokens of a group see, where SELECTED
    counts: tl.tensor,  # int32 [groups]
    positions: tl.tensor,  # int64 [tokens], where STEPS
    places: tl.tensor,  # int64 [2, tokens], where STEPS: of keys and of values, in units of 16 bytes from `k` and `v`
    #   where PAGE int64 [tokens]: of tables, from `table`
    out: tl.tensor,  # [tokens, HEADS, DIM]
    partial: tl.tensor,  # float32 [groups, HEADS / EACH, parts, ROWS, DIM], where SPLIT
    weights: tl.tensor,  # float32 [groups, HEADS / EACH, parts, 2, ROWS]
    tokens: tl.tensor,
    before: tl.tensor,  # tokens of the sequence before the first of these
    size: tl.tensor,  # tokens of a group
    span: tl.tensor,  # keys of a part, a multiple of KEYS
    capacity: tl.tensor,
    scale: tl.tensor,  # of the scores, in powers of 2
    HEADS: tl.constexpr,
    EACH: tl.constexpr,  # query heads that share a head of keys
    DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,  # elements from a token to the next
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    RATIO: tl.constexpr,  # tokens of a block
    SELECTED: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,  # whether tokens are of a sequence each; a group is one then
    UNIT: tl.constexpr,  # elements of 16 bytes
    PAGE: tl.constexpr,  # keys of a page, a multiple of KEYS; 0 where k and v are windows
    PAGE_STRIDE: tl.constexpr,  # elements from a page to the next, of keys and of values
) -> None:
    """Of a group of tokens, a head of keys and a part of the keys that they see."""
    group = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    if STEPS:
        before = tl.load(positions + group).to(tl.int32) - group
        if PAGE:
            table = table_of(table, places, group)
        else:
            k += tl.load(places + group) * UNIT
            v += tl.load(places + tokens + group) * UNIT
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token = group * size + row // EACH
    live = (row < size * EACH) & (token < tokens)
    head = tl.program_id(1) * EACH + row % EACH
    place = token.to(tl.int64)[:, None] * Q_STRIDE + head[:, None] * DIM + dim[None, :]
    queries = tl.load(q + place, mask=live[:, None], other=0.0)
    k += tl.program_id(1) * DIM
    v += tl.program_id(1) * DIM
    last = before + token
    end = before + tl.minimum((group + 1) * size, tokens)
    start = tl.program_id(2) * span
    found = tl.zeros((ROWS, DIM), tl.float32)
    most, total = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    if SELECTED:
        entries += group.to(tl.int64) * capacity
        count = tl.load(counts + group)
        stop = tl.minimum(start + span, count * RATIO)
        # All blocks but those that the tokens lie in, the last of the list, are complete with all tokens.
        complete = count - ((end - 1) // RATIO - (before + group * size) // RATIO + 1)
        whole = _whole(start, tl.minimum(stop, complete * RATIO), KEYS)
        lane, within, bit = tl.arange(0, KEYS // RATIO), tl.arange(0, KEYS) % RATIO, 1 << tl.minimum(row // EACH, 31)
        for at in range(start, whole, KEYS):
            blocks = tl.load(entries + at // RATIO + lane)
            entry = of_each(blocks, RATIO)
            position = (entry >> BITS) * RATIO + within
            allowed = (entry[None, :] & bit[:, None]) != 0
            page = pages_of(table, (blocks >> BITS) * RATIO, RATIO, PAGE)
            keys, values = _lie(k, v, page, position, DIM, K_STRIDE, V_STRIDE, PAGE, PAGE_STRIDE)
            found, most, total = _tile(queries, keys, values, position, allowed, found, most, total, scale, True, False)
        for at in range(whole, stop, KEYS):
            slot = at + tl.arange(0, KEYS)
            entry = tl.load(entries + slot // RATIO, mask=slot < stop, other=0)
            position = (entry >> BITS) * RATIO + within
            allowed = ((entry[None, :] & bit[:, None]) != 0) & (position[None, :] <= last[:, None])
            page = pages_of(table, position, 1, PAGE)
            keys, values = _lie(k, v, page, position, DIM, K_STRIDE, V_STRIDE, PAGE, PAGE_STRIDE)
            found, most, total = _tile(
                queries, keys, values, position < end, allowed, found, most, total, scale, True, True
            )
    else:
        stop = tl.minimum(start + span, end)
        # Up to here all tokens see all keys.
        whole = _whole(start, tl.minimum(stop, before + group * size + 1), KEYS)
        for at in range(start, whole, KEYS):
            position = at + tl.arange(0, KEYS)
            page = page_of(table, at, PAGE)
            keys, values = _lie(k, v, page, position, DIM, K_STRIDE, V_STRIDE, PAGE, PAGE_STRIDE)
            found, most, total = _tile(
                queries, keys, values, position, position, found, most, total, scale, False, False
            )
        for at in range(whole, stop, KEYS):
            position = at + tl.arange(0, KEYS)
            allowed = (position[None, :] <= last[:, None]) & (position[None, :] < stop)
            page = page_of(table, at, PAGE)
            keys, values = _lie(k, v, page, position, DIM, K_STRIDE, V_STRIDE, PAGE, PAGE_STRIDE)
            found, most, total = _tile(
                queries, keys, values, position < end, allowed, found, most, total, scale, True, True
            )
    if SPLIT:
        part = (group * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        part = part.to(tl.int64)
        tl.store(partial + part * (ROWS * DIM) + row[:, None] * DIM + dim[None, :], found)
        tl.store(weights + part * (2 * ROWS) + row, most)
        tl.store(weights + part * (2 * ROWS) + ROWS + row, total)
    else:
        found = found / total[:, None]
        place = token.to(tl.int64)[:, None] * (HEADS * DIM) + head[:, None] * DIM + dim[None, :]
        tl.store(out + place, found.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _lie(
    k: tl.tensor,
    v: tl.tensor,
    page: tl.tensor,  # one for all, or [KEYS, 1]
    position: tl.tensor,  # [KEYS], in the sequence
    DIM: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the keys and values of positions lie, [KEYS, DIM] each."""
    dim = tl.arange(0, DIM)[None, :]
    keys = rows_of(k + dim, page, position, K_STRIDE, PAGE, PAGE_STRIDE)
    return keys, rows_of(v + dim, page, position, V_STRIDE, PAGE, PAGE_STRIDE)


@triton.jit
def _tile(
    queries: tl.tensor,
    keys: tl.tensor,  # where they lie, [KEYS, DIM]
    values: tl.tensor,
    there: tl.tensor,  # bool [KEYS], where ENDS: what lies behind the end was never written
    allowed: tl.tensor,  # bool [ROWS, KEYS], where MASKED
    found: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    ENDS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`found`, `most` and `total` with a tile of keys more."""
    if ENDS:
        # 0 times what was never written need not be 0.
        keys = tl.load(keys, mask=there[:, None], other=0.0)
        values = tl.load(values, mask=there[:, None], other=0.0)
    else:
        keys, values = tl.load(keys), tl.load(values)
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, 1) * scale)
    weight = tl.exp2(scores * scale - highest[:, None])
    fades = tl.exp2(most - highest)
    total = total * fades + tl.sum(weight, 1)
    found = tl.dot(weight.to(values.dtype), values, found * fades[:, None], input_precision="tf32x3")
    return found, highest, total


@triton.jit
def _whole(start: tl.tensor, stop: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """The end of the last of the whole tiles from `start` that lie before `stop`."""
    return start + tl.maximum(stop - start, 0) // KEYS * KEYS


@triton.jit(do_not_specialize=["size", "parts"])
def combine(
    partial: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,  # a power of 2, no less than the parts
    WIDTH: tl.constexpr,  # dimensions that a program takes
) -> None:
    """The output of one token and head from its parts, some dimensions of it."""
    token, head = tl.program_id(0), tl.program_id(1)
    row = token % size * EACH + head % EACH
    place = (token // size * (HEADS // EACH) + head // EACH).to(tl.int64) * parts
    part = tl.arange(0, PARTS)
    dim = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    there = part < parts
    most = tl.load(weights + (place + part) * (2 * ROWS) + row, mask=there, other=-1e30)
    total = tl.load(weights + (place + part) * (2 * ROWS) + ROWS + row, mask=there, other=0.0)
    factor = tl.exp2(most - tl.max(most, 0))
    of_parts = partial + ((place + part) * ROWS + row)[:, None] * DIM + dim[None, :]
    found = tl.sum(tl.load(of_parts, mask=there[:, None], other=0.0) * factor[:, None], 0)
    found = found / tl.sum(total * factor, 0)
    tl.store(out + (token.to(tl.int64) * HEADS + head) * DIM + dim, found.to(out.dtype.element_ty))
