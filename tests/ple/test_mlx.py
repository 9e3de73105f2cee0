from __future__ import annotations

import struct

import numpy as np
import pytest

from lazyio.errors import TableError
from lazyio.ple import mlx
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.codec import decode
from lazyio.ple.dtypes import MLX_TYPES
from lazyio.ple.mlx import MlxType, mlx_type_of


def value_by_value(row: bytes, bits: int, group: int, f16: bool) -> list[float]:
    """Decode a row word by word, in Python's double precision."""
    groups = len(row) // (group * bits // 8 + 4)
    words = struct.unpack(f"<{group * groups * bits // 32}I", row[: group * groups * bits // 8])
    tail = row[len(row) - 4 * groups :]
    if f16:
        floats = struct.unpack(f"<{2 * groups}e", tail)
    else:
        floats = tuple(struct.unpack("<f", b"\0\0" + tail[2 * i : 2 * i + 2])[0] for i in range(2 * groups))
    values = []
    for number in range(group * groups):
        per_word = 32 // bits
        code = words[number // per_word] >> number % per_word * bits & (1 << bits) - 1
        values.append(code * floats[number // group] + floats[groups + number // group])
    return values


def rows_of(stored: str, groups: int, count: int) -> np.ndarray:
    """Rows whose floats are neither infinite nor NaN."""
    row_bytes = groups * MLX_TYPES[stored].block_bytes
    rows = np.random.default_rng(0).integers(0, 256, (count, row_bytes), np.uint8)
    rows[:, -4 * groups :] &= 0xBF
    return rows


@pytest.mark.parametrize("stored", MLX_TYPES)
def test_rows_are_decoded_word_by_word(stored: str) -> None:
    kind = MlxType.named(stored)
    assert kind.name == stored
    rows = rows_of(stored, 5, 9)
    wanted = [value_by_value(row.tobytes(), kind.bits, kind.group, kind.scales == "F16") for row in rows]
    np.testing.assert_allclose(decode(rows, stored), wanted, rtol=1e-6, atol=0)


def test_many_rows_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("MLX_Q8_G32", 5, 25)
    whole = decode(rows, "MLX_Q8_G32")
    monkeypatch.setattr(mlx, "_BYTES_AT_ONCE", 7 * rows.shape[1])
    np.testing.assert_array_equal(decode(rows.reshape(5, 5, -1), "MLX_Q8_G32").reshape(25, 160), whole)


def tensors(words: int, groups: int, scales: str = "BF16") -> list[StoredTensor]:
    return [
        StoredTensor("t.weight", "U32", (7, words), "file", 0, 28 * words),
        StoredTensor("t.scales", scales, (7, groups), "file", 0, 14 * groups),
        StoredTensor("t.biases", scales, (7, groups), "file", 0, 14 * groups),
    ]


def test_the_type_follows_from_the_shapes() -> None:
    assert mlx_type_of(*tensors(20, 5)).name == "MLX_Q4_G32"
    assert mlx_type_of(*tensors(40, 5, "F16")).name == "MLX_Q8_G32_F16"
    assert mlx_type_of(*tensors(40, 5), 64).name == "MLX_Q4_G64"


@pytest.mark.parametrize(("words", "groups", "group"), [(15, 5, 32), (20, 3, 32), (20, 5, 48), (80, 5, 32)])
def test_sizes_without_a_type(words: int, groups: int, group: int) -> None:
    with pytest.raises(TableError, match=rf"bits a value in groups of {group}; 2, 4 or 8"):
        mlx_type_of(*tensors(words, groups), group)


def test_tensors_that_do_not_fit_each_other() -> None:
    weight, scales, biases = tensors(20, 5)
    for trio in (
        (scales, scales, biases),
        (weight, scales, tensors(20, 5, "F16")[2]),
        (weight, tensors(20, 4)[1], biases),
        (weight, StoredTensor("t.scales", "F32", (7, 5), "file", 0, 140), biases),
        (StoredTensor("t.weight", "U32", (8, 20), "file", 0, 640), scales, biases),
    ):
        with pytest.raises(TableError, match="are no quantised rows"):
            mlx_type_of(*trio)
