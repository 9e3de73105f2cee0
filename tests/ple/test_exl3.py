from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.errors import TableError
from lazyio.ple import exl3
from lazyio.ple.codec import decode


def half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def rounded_to_half(value: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def value_of_state(state: int) -> float:
    product = state * 0x83DCD12D % 2**32
    total = sum(product.to_bytes(4, "little"))
    return rounded_to_half((1024 + total) * half(0x1EEE) + half(0xC931))


def value_by_value(row: bytes, bits: int) -> list[float]:
    """Decode a row bit by bit, with nothing but integers and the double precision of Python."""
    words = struct.unpack(f"<{len(row) // 2}H", row)
    ring = [word >> place & 1 for word in words[1:] for place in range(16)]
    assert len(ring) == 160 * bits
    values = []
    for number in range(160):
        # Bit m of a state is bit m % bits of the code that lies m // bits codes back.
        places = [(number - m // bits) % 160 * bits + m % bits for m in range(16)]
        state = sum(ring[place] << m for m, place in enumerate(places))
        values.append(value_of_state(state) * half(words[0]))
    return values


def rows_of(bits: int, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, 2 + 20 * bits), np.uint8)
    rows[:, :2] = rng.normal(0, 0.02, (count, 1)).astype("<f2").view(np.uint8)
    return rows


@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_are_decoded_bit_by_bit(bits: int) -> None:
    rows = rows_of(bits, 20)
    wanted = [value_by_value(row.tobytes(), bits) for row in rows]
    # Both products are exact in float32, so that nothing is left to rounding.
    np.testing.assert_array_equal(decode(rows, f"EXL3_K{bits}"), np.array(wanted, np.float32))


@settings(deadline=None, max_examples=25)
@given(st.binary(min_size=102, max_size=102).filter(lambda row: row[1] & 0x7C != 0x7C))
def test_any_row(row: bytes) -> None:
    decoded = decode(np.frombuffer(row, np.uint8), "EXL3_K5")
    np.testing.assert_array_equal(decoded, np.array(value_by_value(row, 5), np.float32))


def test_a_state_shifts_in_the_next_code() -> None:
    states = exl3._states(rows_of(5, 3)[:, 2:], 5).astype(int)
    codes = exl3._codes(rows_of(5, 3)[:, 2:], 5).astype(int)
    np.testing.assert_array_equal(states, (np.roll(states, 1, axis=1) << 5 | codes) & 0xFFFF)


def test_known_values() -> None:
    # State 0 hashes to 0; the bytes of the factor itself sum to 605.
    assert exl3._codebook()[0] == rounded_to_half(1024 * half(0x1EEE) + half(0xC931))
    assert exl3._codebook()[1] == rounded_to_half(1629 * half(0x1EEE) + half(0xC931))
    zeros = np.zeros((1, 82), np.uint8)
    zeros[0, :2] = np.array([0.5], "<f2").view(np.uint8)
    np.testing.assert_array_equal(decode(zeros, "EXL3_K4"), np.full((1, 160), exl3._codebook()[0] / 2))


def test_many_rows_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(6, 25)
    whole = decode(rows, "EXL3_K6")
    monkeypatch.setattr(exl3, "_ROWS_AT_ONCE", 7)
    np.testing.assert_array_equal(decode(rows.reshape(5, 5, -1), "EXL3_K6").reshape(25, 160), whole)


def test_a_bias_is_added_in_float32() -> None:
    rows = rows_of(4, 10)
    bias = np.random.default_rng(1).normal(size=(10, 160)).astype(np.float32)
    wanted = decode(rows, "EXL3_K4") + bias
    np.testing.assert_array_equal(decode(rows, "EXL3_K4", bias=bias), wanted)
    np.testing.assert_array_equal(decode(rows, "EXL3_K4", np.float16, bias=bias), wanted.astype(np.float16))


def test_rows_of_another_length() -> None:
    with pytest.raises(TableError, match="84 bytes is no whole number of EXL3_K4 blocks, which take 82"):
        decode(np.zeros((1, 84), np.uint8), "EXL3_K4")
