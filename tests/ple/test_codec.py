from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.errors import SettingError, TableError, Unsupported
from lazyio.ple import codec
from lazyio.ple.codec import decode
from lazyio.ple.dtypes import GGUF_TYPES, TYPES

PLAIN = {"F32", "F16", "BF16", "F8_E4M3"}
WITHOUT_DECODER = {"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"}
QUANTISED = sorted({stored.name for stored in GGUF_TYPES.values()} - PLAIN - WITHOUT_DECODER)

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def packed_rows(rows: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    """Bytes without bit 6, so that no float in any type is infinite or NaN."""
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8) & 0xBF


def halves(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 2}e", data))


def nibbles(data: bytes) -> list[int]:
    """Low halves of all bytes, then their high halves."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def block_of_q4_0(block: bytes) -> list[float]:
    return [halves(block[:2])[0] * (nibble - 8) for nibble in nibbles(block[2:])]


def block_of_q4_1(block: bytes) -> list[float]:
    scale, least = halves(block[:4])
    return [scale * nibble + least for nibble in nibbles(block[4:])]


def block_of_q5_1(block: bytes) -> list[float]:
    scale, least = halves(block[:4])
    fifth = int.from_bytes(block[4:8], "little")
    return [scale * (nibble | (fifth >> i & 1) << 4) + least for i, nibble in enumerate(nibbles(block[8:]))]


def block_of_q5_0(block: bytes) -> list[float]:
    fifth = int.from_bytes(block[2:6], "little")
    return [
        halves(block[:2])[0] * ((nibble | (fifth >> i & 1) << 4) - 16) for i, nibble in enumerate(nibbles(block[6:]))
    ]


def block_of_q8_0(block: bytes) -> list[float]:
    return [halves(block[:2])[0] * value for value in struct.unpack("<32b", block[2:])]


def block_of_iq4_nl(block: bytes) -> list[float]:
    return [halves(block[:2])[0] * IQ4_NL[nibble] for nibble in nibbles(block[2:])]


def block_of_mxfp4(block: bytes) -> list[float]:
    return [2.0 ** (block[0] - 127) * E2M1[nibble] for nibble in nibbles(block[1:])]


def block_of_q6_k(block: bytes) -> list[float]:
    low, high, scales, (scale,) = (
        block[:128],
        block[128:192],
        struct.unpack("<16b", block[192:208]),
        halves(block[208:]),
    )
    values = []
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, column = divmod(place, 32)
        nibble = low[64 * half + place % 64] >> (4 if place >= 64 else 0) & 15
        upper = high[32 * half + column] >> (2 * quarter) & 3
        values.append(scale * scales[i // 16] * ((nibble | upper << 4) - 32))
    return values


REFERENCES = {
    "Q4_0": block_of_q4_0,
    "Q4_1": block_of_q4_1,
    "Q5_0": block_of_q5_0,
    "Q5_1": block_of_q5_1,
    "Q8_0": block_of_q8_0,
    "IQ4_NL": block_of_iq4_nl,
    "MXFP4": block_of_mxfp4,
    "Q6_K": block_of_q6_k,
}


@pytest.mark.parametrize("stored", REFERENCES)
def test_blocks_by_hand(stored: str):
    block = TYPES[stored].block_bytes
    packed = packed_rows(3, 2 * block)
    expected = [REFERENCES[stored](row[:block].tobytes()) + REFERENCES[stored](row[block:].tobytes()) for row in packed]
    np.testing.assert_allclose(decode(packed, stored), np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("stored", QUANTISED)
def test_each_row_as_the_gguf_package_has_it(stored: str):
    kind, row_bytes = GGMLQuantizationType[stored], TYPES[stored].row_bytes(512)
    packed = packed_rows(37, row_bytes)
    values = decode(packed, stored)
    assert values.shape == (37, 512)
    for row, expected in zip(values, packed, strict=True):
        np.testing.assert_array_equal(row, dequantize(expected.reshape(1, -1), kind)[0])


def test_more_blocks_than_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch):
    packed = packed_rows(11, 90)
    whole = decode(packed, "IQ4_NL")
    for blocks in (1, 4, 54, 55, 56):
        monkeypatch.setattr(codec, "_BLOCKS_AT_ONCE", blocks)
        np.testing.assert_array_equal(decode(packed, "IQ4_NL"), whole)


@pytest.mark.parametrize("stored", ["Q4_0", "Q5_1", "Q8_0"])
def test_values_survive_the_package_s_own_encoder(stored: str):
    values = np.random.default_rng(1).standard_normal((4, 160)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType[stored])
    np.testing.assert_allclose(decode(packed, stored), values, atol=0.5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_float32(numbers: list[float]):
    packed = np.frombuffer(struct.pack(f"<{len(numbers)}f", *numbers), np.uint8)
    np.testing.assert_array_equal(decode(packed, "F32"), np.array(numbers, np.float32))


def test_every_float16():
    codes = np.arange(65536, dtype="<u2").view(np.uint8).reshape(256, 512)
    expected = np.array(halves(codes.tobytes())).reshape(256, 256)
    np.testing.assert_array_equal(decode(codes, "F16"), expected)


def test_every_bfloat16():
    codes = range(65536)
    packed = np.array(codes, "<u2").view(np.uint8).reshape(256, 512)
    expected = [struct.unpack("<f", bytes([0, 0, code & 255, code >> 8]))[0] for code in codes]
    np.testing.assert_array_equal(decode(packed, "BF16").ravel(), np.array(expected, np.float32))


def test_every_float8():
    def value(code: int) -> float:
        sign = -1 if code & 0x80 else 1
        exponent, mantissa = code >> 3 & 0xF, (code & 7) / 8
        if code & 0x7F == 0x7F:
            return float("nan")
        return sign * (mantissa * 2**-6 if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - 7))

    values = decode(np.arange(256, dtype=np.uint8), "F8_E4M3")
    np.testing.assert_array_equal(values, np.array([value(code) for code in range(256)], np.float32))
    assert values[[0x7E, 0xFE, 0x01, 0x38]].tolist() == [448, -448, 2**-9, 1]
    assert np.signbit(values[0x80])
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.isfinite(values).sum() == 254


def test_every_float8_of_five_exponent_bits():
    codes = np.arange(256, dtype=np.uint8)
    expected = [struct.unpack("<e", bytes([0, code]))[0] for code in range(256)]
    np.testing.assert_array_equal(decode(codes, "F8_E5M2"), np.array(expected, np.float32))


def test_a_scale_multiplies():
    packed = packed_rows(5, 160)
    np.testing.assert_array_equal(
        decode(packed, "F8_E4M3", scale=0.0078125), decode(packed, "F8_E4M3") * np.float32(0.0078125)
    )


@pytest.mark.parametrize("stored", ["F32", "BF16", "F8_E4M3", "IQ4_NL"])
def test_float16_rounds_the_float32_values(stored: str):
    packed = packed_rows(5, TYPES[stored].row_bytes(160))
    half = decode(packed, stored, np.float16)
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, decode(packed, stored).astype(np.float16))


def test_what_float16_can_t_hold_becomes_infinite():
    packed = np.array([1e6, -1e6], "<f4").view(np.uint8)
    assert decode(packed, "F32", np.float16).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("stored", ["F32", "BF16", "F8_E4M3", "Q8_0"])
def test_any_leading_shape_and_memory_layout(stored: str):
    row_bytes = TYPES[stored].row_bytes(64)
    packed = packed_rows(12, row_bytes)
    flat = decode(packed, stored)
    assert decode(packed[0], stored).shape == (64,)
    assert decode(packed[:0], stored).shape == (0, 64)
    np.testing.assert_array_equal(decode(packed.reshape(3, 4, -1), stored), flat.reshape(3, 4, 64))
    np.testing.assert_array_equal(decode(packed[::-2], stored), flat[::-2])
    np.testing.assert_array_equal(decode(np.asfortranarray(packed), stored), flat)


def test_values_do_not_share_memory_with_the_packed_rows():
    packed = packed_rows(2, 64)
    values = decode(packed, "F32")
    kept = values.copy()
    packed[:] = 1
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("stored", [*sorted(WITHOUT_DECODER), "U8", "type-77"])
def test_a_missing_decoder_leaves_packed_rows(stored: str):
    with pytest.raises(Unsupported, match=f"no decoder for rows of type {stored}; they can be had packed"):
        decode(packed_rows(2, TYPES[stored].block_bytes if stored in TYPES else 8), stored)


def test_a_type_the_installed_package_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TYPES, "Q9_Z", TYPES["Q8_0"])
    with pytest.raises(Unsupported, match="Q9_Z"):
        decode(packed_rows(1, 34), "Q9_Z")


@pytest.mark.parametrize("stored", ["IQ4_NL", "F32"])
def test_part_of_a_block_is_refused(stored: str):
    with pytest.raises(TableError, match="91 bytes"):
        decode(packed_rows(2, 91), stored)


def test_what_is_no_packed_row_is_refused():
    for packed in (np.zeros(8, np.int8), np.zeros((), np.uint8), np.zeros((2, 0), np.uint8)):
        with pytest.raises(TableError, match="uint8"):
            decode(packed, "F32")


def test_other_output_types_are_refused():
    for dtype in (np.float64, np.int8):
        with pytest.raises(SettingError, match="float32 or float16"):
            decode(packed_rows(1, 8), "F32", dtype)


def test_plain_types_do_without_the_gguf_package():
    code = (
        "import sys, numpy; from lazyio.ple.codec import decode;"
        "decode(numpy.zeros((1, 8), 'u1'), 'BF16'); sys.exit('gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
