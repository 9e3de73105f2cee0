"""What the GPU does with pages: entries written to where they belong, and where other bodies find them.

Page i of a sequence holds its positions [i * P, (i + 1) * P), and is page table[i] of the pool. Bodies look a page up
once for all that they load of it.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def write(
    first: tl.tensor,  # [entries, WIDTH]
    second: tl.tensor,  # where PAIR
    to_first: tl.tensor,  # the plane, a page PAGE_STRIDE behind the one before
    to_second: tl.tensor,
    table: tl.tensor,  # int64 [pages]
    positions: tl.tensor,  # int64 [entries]
    places: tl.tensor,  # int64 [entries], where STEPS: where the table of each lies, in units of 16 bytes from `table`
    WIDTH: tl.constexpr,
    FIRST_STRIDE: tl.constexpr,  # elements from an entry to the next
    SECOND_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,  # entries of a page
    PAGE_STRIDE: tl.constexpr,
    RATIO: tl.constexpr,  # positions of an entry
    PAIR: tl.constexpr,
    STEPS: tl.constexpr,  # whether entries are of a sequence each
    TILE: tl.constexpr,  # a power of 2, no less than WIDTH
) -> None:
    """One entry, or one of each of two planes."""
    row = tl.program_id(0)
    entry = tl.load(positions + row) // RATIO
    if STEPS:
        table = table_of(table, places, row)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    place = page_of(table, entry, PAGE) * PAGE_STRIDE + _in_page(entry, PAGE) * WIDTH + column
    tl.store(to_first + place, tl.load(first + row.to(tl.int64) * FIRST_STRIDE + column, mask=inside), mask=inside)
    if PAIR:
        tl.store(
            to_second + place, tl.load(second + row.to(tl.int64) * SECOND_STRIDE + column, mask=inside), mask=inside
        )


@triton.jit
def table_of(table: tl.tensor, places: tl.tensor, sequence: tl.tensor) -> tl.tensor:
    """The table of one of several sequences; `places` are in units of 16 bytes, two entries."""
    return table + tl.load(places + sequence) * 2


@triton.jit
def page_of(table: tl.tensor, entry: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """The page of an entry, int64; 0 in a window, whose PAGE is 0."""
    page = 0
    if PAGE:
        page = tl.load(table + _number(entry, PAGE))
    return page


@triton.jit
def pages_of(table: tl.tensor, entries: tl.tensor, EACH: tl.constexpr, PAGE: tl.constexpr) -> tl.tensor:
    """Those of entries [n], each for EACH in a row: [n * EACH, 1]."""
    pages = 0
    if PAGE:
        pages = of_each(tl.load(table + _number(entries, PAGE)), EACH)[:, None]
    return pages


@triton.jit
def rows_of(
    plane: tl.tensor,
    page: tl.tensor,
    entries: tl.tensor,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
) -> tl.tensor:
    """Where entries [n] begin, [n, 1]: all that differs between pages and windows.

    `page` is one for all, or [n, 1]; an entry is STRIDE elements behind the one before it, a page PAGE_STRIDE.
    """
    if PAGE:
        rows = plane + page * PAGE_STRIDE + _in_page(entries, PAGE).to(tl.int64)[:, None] * STRIDE
    else:
        rows = plane + entries.to(tl.int64)[:, None] * STRIDE
    return rows


# A division of what may be negative takes several instructions, and nothing here is.
@triton.jit
def _number(entry: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """entry // PAGE: which page of a sequence has it."""
    return (entry & 0x7FFFFFFF) // PAGE


@triton.jit
def _in_page(entry: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """entry % PAGE, where it lies in its page; PAGE is a power of 2."""
    return entry & (PAGE - 1)


@triton.jit
def of_each(x: tl.tensor, EACH: tl.constexpr) -> tl.tensor:
    """Elements [n], each of them EACH times in a row: [n * EACH]."""
    length: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], (length, EACH)), (length * EACH,))
