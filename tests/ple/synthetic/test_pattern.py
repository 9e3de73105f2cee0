from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.errors import RowIndexError, TableError, Unsupported
from lazyio.ple.codec import decode
from lazyio.ple.dtypes import TYPES
from lazyio.ple.synthetic import expected_rows, row_bytes_of

MASK = 2**64 - 1


def row_by_hand(number: int, row_bytes: int) -> bytes:
    """The description of a row, step by step."""
    state = (number + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & MASK
    state ^= state >> 31
    words = b"".join((state * (2 * k + 1) & MASK).to_bytes(8, "little") for k in range(row_bytes // 8 + 1))
    return bytes(byte & ~0x40 for byte in words[: row_bytes - 16]) + f"{number:016}".encode()


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 10**16 - 1), max_size=5), st.integers(16, 200))
def test_a_row_follows_from_its_number(numbers: list[int], row_bytes: int):
    rows = expected_rows(np.array(numbers, np.int64), "U8", row_bytes)
    assert rows.shape == (len(numbers), row_bytes)
    assert [row.tobytes() for row in rows] == [row_by_hand(number, row_bytes) for number in numbers]


def test_a_row_ends_in_its_number():
    assert expected_rows([48_000_000])[0, -16:].tobytes() == b"0000000048000000"


@pytest.mark.parametrize(("dtype", "values"), [("IQ4_NL", 160), ("Q8_0", 160), ("Q5_K", 8960), ("F8_E4M3", 16)])
def test_no_two_rows_are_equal(dtype: str, values: int):
    rows = expected_rows(range(2000), dtype, values)
    assert rows.shape == (2000, TYPES[dtype].row_bytes(values))
    assert len(np.unique(rows, axis=0)) == 2000


def test_a_piece_of_a_row_is_rarely_that_of_another():
    rows = expected_rows(range(0, 4_000_000, 1000))
    for piece in (rows[:, :4], rows[:, 33:37]):
        assert len(np.unique(piece, axis=0)) > 3990


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_rows_decode_to_finite_values(dtype: str):
    row_values = 160 if dtype.startswith("EXL3") else 512
    packed = expected_rows(range(0, 3000, 7), dtype, row_values)
    try:
        values = decode(packed, dtype)
    except Unsupported:
        return
    assert values.shape == (429, row_values)
    assert np.isfinite(values).all()
    assert len(np.unique(values, axis=0)) == 429


def test_rows_do_not_compress():
    rows = expected_rows(range(20_000), "Q8_0").tobytes()
    assert len(zlib.compress(rows)) > 0.8 * len(rows)


def test_sizes_of_rows():
    assert row_bytes_of("IQ4_NL", 160) == 90
    assert row_bytes_of("BF16", 8960) == 17_920


@pytest.mark.parametrize(
    ("dtype", "values", "message"),
    [("IQ5", 160, "no type IQ5"), ("Q4_K", 160, "no whole number of Q4_K blocks"), ("BF16", 7, "14 bytes")],
)
def test_rows_that_can_t_be(dtype: str, values: int, message: str):
    with pytest.raises(TableError, match=message):
        expected_rows([0], dtype, values)


@pytest.mark.parametrize("ids", [[-1], [10**16], [1.5], [[1, 2]], 3, ["7"]])
def test_ids_that_can_t_be(ids: object):
    with pytest.raises(RowIndexError, match="row ids must"):
        expected_rows(ids)
