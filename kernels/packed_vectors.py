"""Products of very few rows with quantised weights, in the bodies of kernels: `row_products`.

    ys = row_products(x, at, p0, p1, p2, p3, expert, n, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, UNROLL)

are float32 [BLOCK_N] each, the products of some rows of x with rows n of a weight. No tensor cores take part: time goes
by the weight's bytes, and by instructions: about two for each code, and one more for each row of x. A row's sums are
added in the same order, however many others there are, as long as PIECES are the same.

* x points to float32, bfloat16 or float16, aligned to 4 bytes; `at` is a tuple of where rows of x are, in pairs of
  values.
* p0 to p3, STORED, N, K, ROWS and COLUMNS are as in packed_tiles.py; of fp8, COLUMNS are a multiple of 32, or K, and K
  is a multiple of 32 for all.
* expert is an integer; or, with several SLOTS, points to that of each, and products are summed over slots: in x, the
  inputs of one follow on those of another. n [BLOCK_N] are rows, all below N.
* A piece is what a thread loads at once: four words, with 32 codes, or with 16 if they have 8 bits. PIECES of a row, a
  power of two, are taken at once by as many threads, and UNROLL times so many before the next are asked for. What is
  made of x serves all rows that a thread has: let PIECES be less than an eighth of all threads.
"""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_codes import has_high, has_least, left_over, of_eight, piece_inputs, pieces_of, value, with_high
from lazyio.kernels.packed_tiles import loaded_scales, scale_rows, scales_of


@triton.constexpr_function
def _scales_of_weight(stored: str, outputs: int, inputs: int, rows: int, columns: int) -> int:
    """How many elements the plane of scales of a weight has."""
    if stored == "F8_E4M3":
        return -(-outputs // rows) * -(-inputs // columns)
    return outputs * (inputs // (16 if stored == "Q6_K" else 32))


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
) -> tl.tuple:
    """See above."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    steps: tl.constexpr = (SLOTS * of_row + PIECES - 1) // PIECES
    checked: tl.constexpr = SLOTS * of_row % PIECES != 0 or steps % UNROLL != 0
    accs = ()
    for _ in tl.static_range(len(at)):
        accs = accs + (tl.zeros((n.shape[0], PIECES), tl.float32),)
    for first in range(0, steps, UNROLL):
        for i in tl.static_range(UNROLL):
            start = (first + i) * PIECES
            accs = _add_pieces(
                accs, x, at, p0, p1, p2, p3, expert, n, start, STORED, N, K, ROWS, COLUMNS, SLOTS, PIECES, checked
            )
    sums = ()
    for m in tl.static_range(len(at)):
        sums = sums + (tl.sum(accs[m], 1),)
    return sums


@triton.jit
def _add_pieces(
    accs: tl.tuple,
    x: tl.tensor,
    at: tl.tuple,
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    start: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tuple:
    """`accs` and the products of the pieces from `start` on."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    # Tiles are of rows and words; or of pieces and rows, by which Triton shares them out among threads in the same way.
    word, piece = start * 4 + tl.arange(0, PIECES * 4), start + tl.arange(0, PIECES)
    live = word < SLOTS * of_row * 4
    # Two inputs follow on each other for each half of a word, and those of its next place 16 further.
    group: tl.constexpr = 2 * piece_inputs(STORED)
    pair = word + word // 8 * (group // 2 - 8)
    of_words, of_pieces = expert, expert
    if SLOTS > 1:
        slot = tl.minimum(word // (of_row * 4), SLOTS - 1)
        pair += slot * ((K - of_row * piece_inputs(STORED)) // 2)
        of_words = tl.load(expert + slot)[None, :]
        of_pieces = tl.load(expert + tl.minimum(piece // of_row, SLOTS - 1))[:, None]
    if SLOTS > 1 or CHECKED:
        word, piece = word % (of_row * 4), piece % of_row
    first = word // 8 * group
    of_words, of_pieces = tl.cast(of_words, tl.int64), tl.cast(of_pieces, tl.int64)
    of_weight: tl.constexpr = N * of_row * 4
    words = tl.load(p0 + n.to(tl.int64)[:, None] * (of_row * 4) + (of_words * of_weight + word[None, :]))
    words = _four(words.to(tl.uint32, bitcast=True))
    high = words[0]
    if has_high(STORED):
        high = _high(p1, n, of_pieces, piece, STORED, N, K)
    p2 += of_pieces * _scales_of_weight(STORED, N, K, ROWS, COLUMNS)
    row = scale_rows(0, n[None, :], STORED, N, ROWS)
    if of_eight(STORED):
        scale = _byte_scales(p2, row, piece, STORED, K, COLUMNS)
        accs = _add_places(accs, x, at, pair, first, live, words, high, scale, scale, 0, 2, STORED, K, CHECKED)
    elif STORED == "Q6_K":
        p3 += of_pieces * (N * K // 256)
        scales = _scales_of_16(p2, p3, row, piece, K)
        for place in tl.static_range(4):
            scale = scales[place]
            accs = _add_places(accs, x, at, pair, first, live, words, high, scale, scale, place, 1, STORED, K, CHECKED)
    else:
        if SLOTS > 1:
            p2, p3 = p2[:, :, None], (p3 + of_pieces * (N * K // 256))[:, :, None]
        else:
            p3 += of_pieces * (N * K // 256)
        loaded, units = loaded_scales(
            p2, p3, row[:, :, None], (piece // 2)[:, None, None], STORED, K, COLUMNS, K % 64 != 0
        )
        s0, s1, s2, s3, more0, more1 = scales_of(loaded, units, STORED)
        least0, least1 = s0, s2
        if has_least(STORED):
            least0, least1 = more0, more1
        s0, s2, least0, least1 = tl.trans(s0), tl.trans(s2), tl.trans(least0), tl.trans(least1)
        accs = _add_places(accs, x, at, pair, first, live, words, high, s0, least0, 0, 2, STORED, K, CHECKED)
        accs = _add_places(accs, x, at, pair, first, live, words, high, s2, least1, 2, 2, STORED, K, CHECKED)
    return accs


@triton.jit
def _add_places(
    accs: tl.tuple,
    x: tl.tensor,
    at: tl.tuple,
    pair: tl.tensor,
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
    inputs, founds = (), ()
    for m in tl.static_range(len(at)):
        mine, found = (), tl.zeros((1, words[0].shape[1]), tl.float32)
        for i in tl.static_range(PLACES):
            lower, upper = _inputs(x, at[m], pair, first, live, PLACE + i, STORED, K, CHECKED)
            mine = mine + _four(lower) + _four(upper)
        for i in tl.static_range(8 * PLACES):
            found = _less(found, mine[i], left_over(STORED, i // 4 % 2, PLACE + i // 8))
        inputs, founds = inputs + (mine,), founds + (found,)
    for i in tl.static_range(4 * PLACES):
        of_place = words[i % 4]
        if has_high(STORED):
            of_place = with_high(of_place, _of_word(high, i % 4, STORED), (PLACE + i // 4) % 2, STORED)
        lower, upper = value(of_place, 0, PLACE + i // 4, STORED), value(of_place, 1, PLACE + i // 4, STORED)
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
def _inputs(
    x: tl.tensor,
    at: tl.tensor,
    pair: tl.tensor,
    first: tl.tensor,
    live: tl.tensor,
    PLACE: tl.constexpr,
    STORED: tl.constexpr,
    K: tl.constexpr,
    CHECKED: tl.constexpr,
) -> tl.tuple:
    """What codes of one place are multiplied with, those of lower and of upper halves: float32 [1, words]."""
    use = live
    if K % 64 != 0:
        use = use & (first + 16 * PLACE < K)
    masked: tl.constexpr = CHECKED or K % 64 != 0
    place = pair + 8 * PLACE
    if x.dtype.element_ty == tl.float32:
        place = x + 2 * at + place * 2
        lower, upper = _some(place, use, masked), _some(place + 1, use, masked)
    else:
        both = _some(x.to(tl.pointer_type(tl.int32)) + at + place, use, masked).to(tl.uint32, bitcast=True)
        if x.dtype.element_ty == tl.bfloat16:
            lower = (both << 16).to(tl.float32, bitcast=True)
            upper = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            lower = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            upper = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    if STORED == "F8_E4M3":
        lower, upper = lower * 1.152921504606847e18, upper * 1.152921504606847e18  # 2 ** 60: half of what codes lack
    return lower[None, :], upper[None, :]


@triton.jit
def _some(place: tl.tensor, use: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    if MASKED:
        return tl.load(place, mask=use, other=0)
    else:
        return tl.load(place)


@triton.jit
def _byte_scales(
    p2: tl.tensor,
    row: tl.tensor,
    piece: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Those of pieces of codes of 8 bits: [BLOCK_N, PIECES]."""
    if STORED == "F8_E4M3":
        place = row * ((K + COLUMNS - 1) // COLUMNS) + (piece // 2 * 32 // COLUMNS)[:, None]
        scale = _some(p2 + place, (piece // 2 * 32 < K)[:, None], K % 64 != 0) * 1.152921504606847e18
    else:
        place = row * (K // 32) + (piece // 2)[:, None]
        scale = _some(p2 + place, (piece // 2 * 32 < K)[:, None], K % 64 != 0).to(tl.float32)
    return tl.trans(scale)


@triton.jit
def _scales_of_16(p2: tl.tensor, p3: tl.tensor, row: tl.tensor, piece: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Those of Q6_K, of each place."""
    unit = tl.load(p3 + (row * (K // 256) + (piece // 8)[:, None])).to(tl.float32)
    four = tl.load(p2.to(tl.pointer_type(tl.int32)) + (row * (K // 64) + (piece // 2)[:, None]))
    four = four.to(tl.uint32, bitcast=True) ^ 0x80808080
    s0, s1 = unit * _byte_number(four, 0), unit * _byte_number(four, 8)
    s2, s3 = unit * _byte_number(four, 16), unit * _byte_number(four, 24)
    return tl.trans(s0), tl.trans(s1), tl.trans(s2), tl.trans(s3)


@triton.jit
def _byte_number(word: tl.tensor, FIRST_BIT: tl.constexpr) -> tl.tensor:
    """A byte of a word, less 128."""
    return (word >> FIRST_BIT & 255 | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _high(
    p1: tl.tensor,
    n: tl.tensor,
    expert: tl.tensor,
    piece: tl.tensor,
    STORED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """The high bits of pieces: [BLOCK_N, PIECES], those of a piece as one number."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    p1 = p1.to(tl.pointer_type(tl.uint64 if STORED == "Q6_K" else tl.uint32))
    # That pieces follow on each other is hidden from Triton: a thread would load several, and pass them on to others.
    piece = piece ^ tl.program_id(2)  # no grid has a third dimension
    return tl.trans(tl.load(p1 + n.to(tl.int64)[None, :] * of_row + (expert * (N * of_row) + piece[:, None])))


@triton.jit
def _of_word(high: tl.tensor, WORD: tl.constexpr, STORED: tl.constexpr) -> tl.tensor:
    """The high bits of one of a piece's words."""
    if STORED == "Q6_K":
        return (high >> 16 * WORD).to(tl.uint32)
    else:
        return high >> 8 * WORD
