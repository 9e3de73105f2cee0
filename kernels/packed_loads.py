"""What products with quantised weights load of them, before any of it is waited for: of packed_vectors.py."""

# What Triton compiles into a kernel is in capitals, as its own documentation has it; its decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from lazyio.kernels.packed_codes import has_high, of_eight, pieces_of
from lazyio.kernels.packed_tiles import load, loaded_scales, scale_rows


@triton.constexpr_function
def _scales_of_weight(stored: str, outputs: int, inputs: int, rows: int, columns: int) -> int:
    """How many elements the plane of scales of a weight has."""
    if stored == "F8_E4M3":
        return -(-outputs // rows) * -(-inputs // columns)
    return outputs * (inputs // (16 if stored == "Q6_K" else 32))


@triton.constexpr_function
def _further_slots(of_row: int, slots: int, pieces: int) -> int:
    """How many slots, beyond that of the first of them, pieces can be of. Each expert is one number for all threads."""
    return min(slots - 1, (pieces + of_row - 2) // of_row)


@triton.jit
def experts_of(
    expert: tl.tensor, start: tl.tensor, OF_ROW: tl.constexpr, SLOTS: tl.constexpr, PIECES: tl.constexpr
) -> tl.tuple:
    """Those of the words, [1, words], and of the pieces from `start` on, [PIECES, 1]; or the only one."""
    if SLOTS > 1:
        word, piece = (start * 4 + tl.arange(0, PIECES * 4))[None, :], (start + tl.arange(0, PIECES))[:, None]
        slot = start // OF_ROW
        of_words = tl.load(expert + tl.minimum(slot, SLOTS - 1)).to(tl.int32)
        of_pieces = of_words
        for _ in tl.static_range(_further_slots(OF_ROW, SLOTS, PIECES)):
            slot += 1
            following = tl.load(expert + tl.minimum(slot, SLOTS - 1)).to(tl.int32)
            of_words = tl.where(word >= slot * (OF_ROW * 4), following, of_words)
            of_pieces = tl.where(piece >= slot * OF_ROW, following, of_pieces)
    else:
        of_words, of_pieces = expert, expert
    return tl.cast(of_words, tl.int64), tl.cast(of_pieces, tl.int64)


@triton.jit
def load_pieces(
    p0: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    of_words: tl.tensor,
    of_pieces: tl.tensor,
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
    """What a weight has for the pieces from `start` on: words, high bits, scales and units as they are stored."""
    of_row: tl.constexpr = pieces_of(STORED, K)
    # Tiles are of rows and words; or of pieces and rows, by which Triton shares them out among threads in the same way.
    word, piece = start * 4 + tl.arange(0, PIECES * 4), start + tl.arange(0, PIECES)
    if SLOTS > 1 or CHECKED:
        word, piece = word % (of_row * 4), piece % of_row
    of_weight: tl.constexpr = N * of_row * 4
    words = tl.load(p0 + n.to(tl.int64)[:, None] * (of_row * 4) + (of_words * of_weight + word[None, :]))
    high = words
    if has_high(STORED):
        high = _high(p1, n, of_pieces, piece, STORED, N, K)
    p2 += of_pieces * _scales_of_weight(STORED, N, K, ROWS, COLUMNS)
    row = scale_rows(0, n[None, :], STORED, N, ROWS)
    if of_eight(STORED):
        scales = _byte_scales(p2, row, piece, STORED, K, COLUMNS)
        units = scales
    elif STORED == "Q6_K":
        units = tl.load(p3 + of_pieces * (N * K // 256) + (row * (K // 256) + (piece // 8)[:, None]))
        scales = tl.load(p2.to(tl.pointer_type(tl.int32)) + (row * (K // 64) + (piece // 2)[:, None]))
    else:
        p3 += of_pieces * (N * K // 256)
        if SLOTS > 1:
            p2, p3 = p2[:, :, None], p3[:, :, None]
        scales, units = loaded_scales(
            p2, p3, row[:, :, None], (piece // 2)[:, None, None], STORED, K, COLUMNS, K % 64 != 0
        )
    return words.to(tl.uint32, bitcast=True), high, scales, units


@triton.jit
def _byte_scales(
    p2: tl.tensor,
    row: tl.tensor,
    piece: tl.tensor,
    STORED: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Those of pieces of codes of 8 bits, as they are stored: [PIECES, BLOCK_N]."""
    if STORED == "F8_E4M3":
        place = row * ((K + COLUMNS - 1) // COLUMNS) + (piece // 2 * 32 // COLUMNS)[:, None]
    else:
        place = row * (K // 32) + (piece // 2)[:, None]
    return load(p2 + place, (piece // 2 * 32 < K)[:, None], K % 64 != 0)


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
