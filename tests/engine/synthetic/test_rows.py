from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from lazyio.engine.synthetic.rows import ROW_TYPES, SCALE, Rows, encode
from lazyio.errors import TableError, Unsupported
from lazyio.ple.codec import decode


def filled(rows: Rows, first: int, count: int) -> np.ndarray:
    out = np.empty((count, rows.row_bytes), np.uint8)
    rows.fill(first, out)
    return out


@pytest.mark.parametrize("stored", ROW_TYPES)
def test_values_are_about_normal(stored: str):
    values = decode(filled(Rows(stored, 512, seed=3), 0, 400), stored, scale=SCALE if stored.startswith("F8") else None)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.1
    assert 0.9 < values.std() < 1.1
    assert np.abs(values).max() < 12


def test_fp8_has_no_number_for_what_lies_beyond_its_largest():
    values = torch.tensor([[1e4, -1e4, 465.0, 448.0, 1.0]])
    assert decode(encode(values, "F8_E4M3"), "F8_E4M3", scale=1.0).tolist() == [[448, -448, 448, 448, 1]]


def test_rows_differ_and_can_be_made_alone():
    rows = Rows("Q4_0", 160, seed=1)
    many = filled(rows, 0, 50_000)
    assert len(np.unique(many, axis=0)) == 50_000
    for first in (0, 1, 4095, 49_999):
        assert np.array_equal(filled(rows, first, 1)[0], many[first])
    # Not one block of a row is that of its neighbour, but for chance.
    blocks = many.reshape(-1, 5, 18)
    assert (blocks[1:] == blocks[:-1]).all(-1).mean() < 0.001
    assert len(np.unique(blocks[:, 4], axis=0)) > 15_000


def test_the_seed_changes_all_of_them():
    one, same, other = (filled(Rows("BF16", 160, seed), 0, 100) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not (one == other).all(axis=1).any()


def test_rows_of_odd_widths():
    assert filled(Rows("F32", 7, seed=1), 0, 3).shape == (3, 28)
    with pytest.raises(TableError, match="no whole number of Q8_0 blocks"):
        Rows("Q8_0", 7, seed=1)
    with pytest.raises(Unsupported, match="rows of IQ1_S can't be made; these can: F32"):
        Rows("IQ1_S", 256, seed=1)


def test_values_are_encoded_as_by_the_gguf_package():
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for stored in ("F32", "F16", "BF16", "Q8_0", "Q5_1"):
        kind = gguf.GGMLQuantizationType[stored]
        wanted = gguf.quants.quantize(values.numpy(), kind)
        assert np.array_equal(encode(values, stored), wanted.view(np.uint8).reshape(4, -1))
