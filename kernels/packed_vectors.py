"""Products of very few rows with quantised weights, in the bodies of kernels: `row_products`.

    ys = row_products(x, at, p0, p1, p2, p3, expert, n, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, UNROLL, LATE)

are float32 [BLOCK_N] each, the products of some rows of x with rows n of a weight. No tensor cores take part: time goes
by the weight's bytes, and by instructions: about two for each code, and one more for each row of x. A row's sums are
added in the same order, however many others there are, as long as PIECES are the same.

* x points to float32, bfloat16 or float16, aligned to 8 bytes; `at` is a tuple of where rows of x are, multiples of 4.
* p0 to p3, STORED, N, K, ROWS and COLUMNS are as in packed_tiles.py; of fp8, COLUMNS are a multiple of 32, or K, and K
  is a multiple of 32 for all.
* expert is an integer; or, with several SLOTS, points to that of each, and products are summed over slots: in x, the
  inputs of one follow on those of another. n [BLOCK_N] are rows, all below N.
* A piece is what a thread loads at once: four words, with 32 codes, or with 16 if they have 8 bits. PIECES of a row, a
  power of two, are taken at once by as many threads, and UNROLL times so many before the next are asked for. What is
  made of x serves all rows that a thread has: let PIECES be less than half of all threads.
* LATE if x is what the launch before makes, which this one is allowed to begin before the end of (`launch_pdl`).
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types;
# tuples grow by what is added to them, which is what it takes.
# ruff: noqa: N803, RUF005
# mypy: disable-error-code="untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_wait

from lazyio.kernels.packed_codes import (
    has_high,
    has_least,
    left_over,
    of_eight,
    piece_inputs,
    pieces_of,
    value,
    with_high,
)
from lazyio.kernels.packed_inputs import inputs_of
from lazyio.kernels.packed_loads import experts_of, load_pieces
from lazyio.kernels.packed_tiles import scales_of


@triton.jit
def row_products(
    x: tl.tensor,
    at: tl.tuple,
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
    LATE: tl.constexpr,
) -> tl.tuple:
    """See above."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    steps: tl.constexpr = (SLOTS * of_row + PIECES - 1) // PIECES
    checked: tl.constexpr = SLOTS * of_row % PIECES != 0 or steps % UNROLL != 0
    accs = ()
    for _ in tl.static_range(len(at)):
        accs = accs + (tl.zeros((n.shape[0], PIECES), tl.float32),)
    ahead = _load_steps(p0, p1, p2, p3, expert, n, 0, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, UNROLL, checked)
    if steps <= UNROLL:
        accs = _add_steps(accs, x, at, ahead, 0, STORED, K, SLOTS, PIECES, UNROLL, LATE, checked)
    else:
        last: tl.constexpr = (steps - 1) // UNROLL * UNROLL
        for first in range(0, steps, UNROLL):
            loaded = ahead
            following = tl.minimum(first + UNROLL, last)
            ahead = _load_steps(
                p0, p1, p2, p3, expert, n, following, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, UNROLL, checked
            )
            accs = _add_steps(accs, x, at, loaded, first, STORED, K, SLOTS, PIECES, UNROLL, LATE, checked)
    sums = ()
    for m in tl.static_range(len(at)):
        sums = sums + (tl.sum(accs[m], 1),)
    return sums


@triton.jit
def _load_steps(
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    first: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tuple:
    """All that these steps take of the weight, none of which is waited for yet."""
    experts, loads = (), ()
    for i in tl.static_range(UNROLL):
        experts = experts + (experts_of(expert, (first + i) * PIECES, pieces_of(STORED, K), SLOTS, PIECES),)
    for i in tl.static_range(UNROLL):
        start = (first + i) * PIECES
        of_words, of_pieces = experts[i]
        loads = loads + (
            load_pieces(
                p0, p1, p2, p3, of_words, of_pieces, n, start, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, CHECKED
            ),
        )
    return loads


@triton.jit
def _add_steps(
    accs: tl.tuple,
    x: tl.tensor,
    at: tl.tuple,
    loads: tl.tuple,
    first: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLL: tl.constexpr,
    LATE: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tuple:
    """`accs` and the products of these steps."""
    # Past this no load is moved: the assembler would put each where it is waited for, to save registers.
    tl.debug_barrier()
    if LATE:
        gdc_wait()
    for i in tl.static_range(UNROLL):
        accs = _add_pieces(accs, x, at, loads[i], (first + i) * PIECES, STORED, K, SLOTS, PIECES, CHECKED)
    return accs


@triton.jit
def _add_pieces(
    accs: tl.tuple,
    x: tl.tensor,
    at: tl.tuple,
    loaded: tl.tuple,
    start: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tuple:
    """`accs` and the products of the pieces from `start` on."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    # Four inputs that follow on each other are of two words, and those of their next place are 16 further.
    four = start * 2 + tl.arange(0, PIECES * 2)
    live = four < SLOTS * of_row * 2
    group: tl.constexpr = 2 * piece_inputs(STORED)
    column = four + four // 4 * (group // 4 - 4)
    if SLOTS > 1:
        slot = tl.minimum(four // (of_row * 2), SLOTS - 1)
        column += slot * ((K - of_row * piece_inputs(STORED)) // 4)
    if SLOTS > 1 or CHECKED:
        four = four % (of_row * 2)
    first = four // 4 * group
    words, high, scales, units = loaded
    words = _four(words)
    if of_eight(STORED):
        scale = _byte_values(scales, STORED)
        accs = _add_places(accs, x, at, column, first, live, words, high, scale, scale, 0, 2, STORED, K, CHECKED)
    elif STORED == "Q6_K":
        four = _scales_of_16(scales, units)
        for place in tl.static_range(4):
            scale = four[place]
            accs = _add_places(
                accs, x, at, column, first, live, words, high, scale, scale, place, 1, STORED, K, CHECKED
            )
    else:
        s0, _, s2, _, more0, more1 = scales_of(scales, units, STORED)
        least0, least1 = s0, s2
        if has_least(STORED):
            least0, least1 = more0, more1
        s0, s2, least0, least1 = tl.trans(s0), tl.trans(s2), tl.trans(least0), tl.trans(least1)
        accs = _add_places(accs, x, at, column, first, live, words, high, s0, least0, 0, 2, STORED, K, CHECKED)
        accs = _add_places(accs, x, at, column, first, live, words, high, s2, least1, 2, 2, STORED, K, CHECKED)
    return accs


@triton.jit
def _add_places(
    accs: tl.tuple,
    x: tl.tensor,
    at: tl.tuple,
    column: tl.tensor,
    first: tl.tensor,
    live: tl.tensor,
    words: tl.tuple,
    high: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    PLACE: tl.constexpr,
    PLACES: tl.constexpr,
    STORED: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tuple:
    """`accs` and products of the codes of some places, which have the same scale."""
    exact: tl.constexpr = x.dtype.element_ty == tl.float32
    inputs, founds = (), ()
    for m in tl.static_range(len(at)):
        mine, found = (), tl.zeros((1, words[0].shape[1]), tl.float32)
        for i in tl.static_range(PLACES):
            mine = mine + inputs_of(x, at[m], column, first, live, PLACE + i, STORED, K, CHECKED)
        for i in tl.static_range(8 * PLACES):
            found = _less(found, mine[i], left_over(STORED, i // 4 % 2, PLACE + i // 8, exact))
        inputs, founds = inputs + (mine,), founds + (found,)
    for i in tl.static_range(4 * PLACES):
        of_place = words[i % 4]
        if has_high(STORED):
            of_place = with_high(of_place, _of_word(high, i % 4, STORED), (PLACE + i // 4) % 2, STORED)
        lower = value(of_place, 0, PLACE + i // 4, STORED, exact)
        upper = value(of_place, 1, PLACE + i // 4, STORED, exact)
        then = ()
        for m in tl.static_range(len(at)):
            mine = inputs[m]
            then = then + (founds[m] + lower * mine[i + i // 4 * 4] + upper * mine[i + i // 4 * 4 + 4],)
        founds = then
    found = ()
    for m in tl.static_range(len(at)):
        acc = accs[m] + scale * founds[m]
        if has_least(STORED):
            acc += least * _sum(inputs[m])
        found = found + (acc,)
    return found


@triton.jit
def _less(found: tl.tensor, inputs: tl.tensor, OVER: tl.constexpr) -> tl.tensor:
    if OVER != 0:
        found = found - inputs * OVER
    return found


@triton.jit
def _sum(parts: tl.tuple) -> tl.tensor:
    found = parts[0]
    for i in tl.static_range(1, len(parts)):
        found += parts[i]
    return found


@triton.jit
def _four(words: tl.tensor) -> tl.tuple:
    """[n, words] as the first, second, third and last words of pieces."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, last = tl.split(odd)
    return first, second, third, last


@triton.jit
def _byte_values(scales: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    if STORED == "F8_E4M3":
        scales *= 1.152921504606847e18
    return tl.trans(scales.to(tl.float32))


@triton.jit
def _scales_of_16(scales: tl.tensor, units: tl.tensor) -> tl.tuple:
    """Those of Q6_K, of each place."""
    unit, four = units.to(tl.float32), scales.to(tl.uint32, bitcast=True) ^ 0x80808080
    s0, s1 = unit * _byte_number(four, 0), unit * _byte_number(four, 8)
    s2, s3 = unit * _byte_number(four, 16), unit * _byte_number(four, 24)
    return tl.trans(s0), tl.trans(s1), tl.trans(s2), tl.trans(s3)


@triton.jit
def _byte_number(word: tl.tensor, FIRST_BIT: tl.constexpr) -> tl.tensor:
    """A byte of a word, less 128."""
    return (word >> FIRST_BIT & 255 | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _of_word(high: tl.tensor, WORD: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """The high bits of one of a piece's words."""
    if STORED == "Q6_K":
        return (high >> 16 * WORD).to(tl.uint32)
    else:
        return high >> 8 * WORD
