from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.errors import RowIndexError, TableError
from lazyio.fetchers.base import Extent
from lazyio.ple.ngram import derive_constants
from lazyio.ple.rowids import IdentityRowIds, NgramRowIds, row_ids_of
from lazyio.ple.spec import NgramHash, TableSpec

EOS = 248_044
RELEASED = derive_constants(320_001_536)

# Row ids that the model's own implementation gives for these tokens, at the start of a sequence.
VECTORS = {
    5: "15389869 39778609 55713969 62213332 88817728 118483999 133731511 155458159 "
    "179763390 197956758 205378969 220499474 242466248 265658744 293662119 315720898",
    7: "12441580 26378836 53347667 75104214 99467174 114254887 126436461 156012011 "
    "169119442 187827161 214803956 239809754 242938905 266427765 294337448 314484167",
    EOS: "10204458 27984170 41283776 68842151 85621153 118821647 129504214 158727320 "
    "176298516 181690702 206665473 238343128 252151767 267018740 285543023 319927855",
    9: "18043673 37626835 51159316 78294604 94015356 106720349 136526052 144330141 "
    "176817901 186368539 203707490 230017629 247662678 266533413 293096193 307951937",
    11: "10041117 28960672 48420531 71664411 83016360 106800418 122476460 150044571 "
    "163654473 184259024 206781966 224776026 248853488 273290488 294849492 303242927",
}
EXPECTED = np.array([[int(row) for row in rows.split()] for rows in VECTORS.values()])

TINY_EOS = 3
SIZES = (101, 103, 107, 109, 113, 127)
TINY = NgramHash((23, 41, 5, 77), SIZES, (0, *accumulate(SIZES[:-1])), heads_per_ngram=2, eos=TINY_EOS)

# Few different tokens, so that EOS and repeated n-grams turn up in short sequences.
sequences = st.lists(st.integers(0, 6), max_size=24)


def one_by_one(constants: NgramHash, tokens: list[int]) -> list[list[int]]:
    """The rule as it is written down, position by position."""
    rows = []
    for position in range(len(tokens)):
        window = []
        for distance in range(len(constants.multipliers)):
            between = tokens[max(0, position - distance) : position]
            whole = distance <= position and (distance == 0 or constants.eos not in between)
            window.append(tokens[position - distance] if whole else constants.eos)
        row = []
        for head, (size, offset) in enumerate(zip(constants.head_sizes, constants.head_offsets, strict=True)):
            mix = 0
            for token, multiplier in list(zip(window, constants.multipliers, strict=True))[
                : 2 + head // constants.heads_per_ngram
            ]:
                mix ^= token * multiplier
            row.append(mix % size + offset)
        rows.append(row)
    return rows


def spec_of(rows: int, ngram: NgramHash | None) -> TableSpec:
    extent = Extent("table.gguf", 0, 0, rows)
    return TableSpec("table.gguf", "rows.weight", "Q8_0", rows, 160, 170, (extent,), ngram=ngram)


def test_the_released_model_gives_the_known_rows():
    np.testing.assert_array_equal(NgramRowIds(RELEASED)(list(VECTORS)), EXPECTED)


def test_the_known_rows_token_by_token():
    row_ids, before = NgramRowIds(RELEASED), None
    for token, rows in zip(VECTORS, EXPECTED, strict=True):
        np.testing.assert_array_equal(row_ids([token], before), [rows])
        before = row_ids.tail([token], before)


def test_rows_are_int64_and_one_row_of_heads_a_token():
    rows = NgramRowIds(RELEASED)(np.arange(10, dtype=np.uint16))
    assert rows.dtype == np.int64
    assert rows.shape == (10, 16)
    assert rows.flags.c_contiguous


def test_a_token_needs_as_many_different_rows_as_there_are_heads():
    rows = NgramRowIds(RELEASED)(np.arange(0, 248_000, 997))
    assert (np.diff(rows, axis=1) > 0).all()


@settings(deadline=None, max_examples=150)
@given(sequences)
def test_rows_follow_the_written_rule(tokens: list[int]):
    expected = np.array(one_by_one(TINY, tokens)).reshape(-1, TINY_HEADS)
    np.testing.assert_array_equal(NgramRowIds(TINY)(tokens), expected)


TINY_HEADS = len(SIZES)


@settings(deadline=None, max_examples=150)
@given(sequences, st.lists(st.integers(1, 6), max_size=8))
def test_cuts_change_nothing(tokens: list[int], lengths: list[int]):
    row_ids = NgramRowIds(TINY)
    edges = [edge for edge in accumulate(lengths, initial=0) if edge < len(tokens)] + [len(tokens)]
    before, rows = None, [np.empty((0, row_ids.heads), np.int64)]
    for start, stop in pairwise(edges):
        rows.append(row_ids(tokens[start:stop], before))
        before = row_ids.tail(tokens[start:stop], before)
    np.testing.assert_array_equal(np.concatenate(rows), row_ids(tokens))


@pytest.mark.parametrize("cut", range(1, 8))
def test_eos_on_either_side_of_a_cut(cut: int):
    tokens = [EOS, 4, EOS, EOS, 8, 9, EOS, 10]
    row_ids = NgramRowIds(RELEASED)
    parts = (row_ids(tokens[:cut]), row_ids(tokens[cut:], row_ids.tail(tokens[:cut])))
    np.testing.assert_array_equal(np.concatenate(parts), row_ids(tokens))


@settings(deadline=None, max_examples=50)
@given(sequences, st.integers(0, 24))
def test_the_whole_history_serves_as_well_as_its_tail(tokens: list[int], cut: int):
    row_ids = NgramRowIds(TINY)
    for history in (tokens[:cut], np.array(tokens[:cut], np.int32)):
        np.testing.assert_array_equal(row_ids(tokens[cut:], history), row_ids(tokens)[cut:])


def test_an_old_tail_goes_back():
    row_ids = NgramRowIds(TINY)
    tail = row_ids.tail([1, 2, 4, 5])
    kept = tail.copy()
    first = row_ids([6, 1], tail)
    row_ids.tail([6, 1], tail)
    np.testing.assert_array_equal(tail, kept)
    np.testing.assert_array_equal(row_ids([6, 1], tail), first)


def test_no_tokens_need_no_rows():
    row_ids = NgramRowIds(RELEASED)
    assert row_ids([]).shape == (0, 16)
    np.testing.assert_array_equal(row_ids.tail([], [8, 9]), [8, 9])
    np.testing.assert_array_equal(row_ids.tail([]), [EOS, EOS])


@pytest.mark.parametrize(
    "tokens",
    [[-1], [3, -7, 2], [248_320], [2**40], [2**63], np.array([1.0]), [[1, 2]], np.array([True]), ["a"]],
    ids=str,
)
def test_bad_token_ids_are_refused(tokens: object):
    for row_ids in (NgramRowIds(RELEASED, vocab=248_320), IdentityRowIds(248_320)):
        with pytest.raises(RowIndexError):
            row_ids(tokens)
    with pytest.raises(RowIndexError):
        NgramRowIds(RELEASED, vocab=248_320)([1], before=tokens)


def test_a_refusal_names_the_id_and_the_bound():
    with pytest.raises(RowIndexError, match="token id 500 is outside 0 to 99"):
        NgramRowIds(TINY, vocab=100)([1, 500])


def test_without_a_vocabulary_ids_end_where_products_would_overflow():
    row_ids = NgramRowIds(RELEASED)
    largest = (2**63 - 1) // max(RELEASED.multipliers)
    expected = one_by_one(RELEASED, [largest, largest])
    np.testing.assert_array_equal(row_ids([largest, largest]), expected)
    with pytest.raises(RowIndexError):
        row_ids([largest + 1])


def test_identity():
    row_ids = IdentityRowIds(100)
    tokens = np.array([7, 0, 99, 7], np.int32)
    rows = row_ids(tokens, row_ids.tail([1, 2]))
    np.testing.assert_array_equal(rows, [[7], [0], [99], [7]])
    assert rows.dtype == np.int64
    assert row_ids([]).shape == (0, 1)
    with pytest.raises(RowIndexError, match="token id 100 is outside 0 to 99"):
        row_ids([100])


def test_identity_does_not_share_memory_with_its_tokens():
    tokens = np.arange(4)
    IdentityRowIds(100)(tokens)[:] = 50
    np.testing.assert_array_equal(tokens, np.arange(4))


def test_a_table_says_how_its_rows_are_found():
    hashed = row_ids_of(spec_of(320_001_536, RELEASED))
    plain = row_ids_of(spec_of(262_144, None))
    assert (hashed.heads, hashed.context) == (16, 2)
    assert (plain.heads, plain.context) == (1, 0)


def test_a_vocabulary_can_be_given_for_a_table():
    with pytest.raises(RowIndexError, match="outside 0 to 248319"):
        row_ids_of(spec_of(320_001_536, RELEASED), vocab=248_320)([248_320])


def test_constants_that_reach_beyond_the_table_are_refused():
    assert row_ids_of(spec_of(sum(SIZES), TINY)).heads == TINY_HEADS
    with pytest.raises(TableError, match=f"address {sum(SIZES)} rows, but the table has {sum(SIZES) - 1}"):
        row_ids_of(spec_of(sum(SIZES) - 1, TINY))


def test_a_table_of_another_model_is_told_by_rows_that_no_head_addresses():
    padded = sum(SIZES) + 4096
    assert row_ids_of(spec_of(padded, TINY)).heads == TINY_HEADS
    with pytest.raises(TableError, match=f"address {sum(SIZES)} rows, and the table has {padded + 1}, more than 4096"):
        row_ids_of(spec_of(padded + 1, TINY))


@pytest.mark.parametrize("rows", [390, 981_818, 385_482_465, 2**40])
def test_constants_made_for_a_table_fit_it(rows: int):
    assert row_ids_of(spec_of(rows, derive_constants(rows))).heads == 16


@pytest.mark.parametrize(
    "constants",
    [
        NgramHash((1,), SIZES, TINY.head_offsets, 2, 0),
        NgramHash((1, 3, 5), SIZES, TINY.head_offsets, 2, 0),
        NgramHash((1, 3, 5, 7), SIZES, TINY.head_offsets[:5], 2, 0),
        NgramHash((1, 3, 5, 7), SIZES, TINY.head_offsets, 0, 0),
        NgramHash((1, 3, 5, 0), SIZES, TINY.head_offsets, 2, 0),
        NgramHash((1, 3, 5, 2**63), SIZES, TINY.head_offsets, 2, 0),
        NgramHash((1, 3, 5, 7), (0, *SIZES[1:]), TINY.head_offsets, 2, 0),
        NgramHash((1, 3, 5, 7), SIZES, (-1, *TINY.head_offsets[1:]), 2, 0),
        NgramHash((1, 3, 5, 7), SIZES, (2**63 - 1, *TINY.head_offsets[1:]), 2, 0),
        NgramHash((1, 3, 5, 7), SIZES, TINY.head_offsets, 2, -1),
        NgramHash((1, 3, 5, 2**62), SIZES, TINY.head_offsets, 2, 2),
    ],
)
def test_constants_that_contradict_each_other_are_refused(constants: NgramHash):
    with pytest.raises(TableError):
        NgramRowIds(constants)


@pytest.mark.parametrize(
    ("tensor", "architecture"),
    [("model.layers.1.ple.ple_embedding.ngram_embedding.weight", None), ("per_layer_token_embd.weight", "qwen4exp")],
)
def test_a_hashed_table_without_constants_has_no_row_ids(tensor: str, architecture: str | None) -> None:
    spec = replace(spec_of(1000, None), tensor=tensor, architecture=architecture)
    with pytest.raises(TableError, match=r"constants of the hash are not in the file; open the folder"):
        row_ids_of(spec)
