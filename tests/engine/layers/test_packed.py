from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lazyio.engine.layers import packed
from lazyio.engine.layers.packed import cut, rows_of, times
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, random, reference_dequantise

CPU = torch.device("cpu")


def weight_of(stored: str, *shape: int, block: tuple[int, int] | None = None) -> PackedWeight:
    return random(stored, shape, CPU, torch.Generator().manual_seed(4), 1.0, block)


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_pieces(stored: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_VALUES_AT_ONCE", 128 * 256)
    weight = weight_of(stored, 300, 256, block=(128, 128))
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(5)).to(dtype)
    found = times(x, weight)
    assert (found.shape, found.dtype) == ((2, 3, 300), dtype)
    torch.testing.assert_close(found, functional.linear(x, reference_dequantise(weight).to(dtype)))


@pytest.mark.parametrize("block", [(128, 128), (1, 256), (300, 256), (7, 50)])
def test_products_with_fp8_in_pieces_of_whole_blocks(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_VALUES_AT_ONCE", 100 * 256)
    weight = weight_of("F8_E4M3", 300, 256, block=block)
    weight.planes[1].uniform_(0.5, 2, generator=torch.Generator().manual_seed(6))
    x = torch.eye(256)
    torch.testing.assert_close(times(x, weight), reference_dequantise(weight).T)


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_rows(stored: str) -> None:
    weight = weight_of(stored, 300, 256, block=(128, 128))
    rows = torch.tensor([299, 0, 128, 127, 128])
    assert torch.equal(rows_of(weight, rows, torch.float32), reference_dequantise(weight)[rows])
    assert rows_of(weight, rows, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("stored", ["Q4_K", "F8_E4M3"])
def test_rows_as_a_kernel_takes_them(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "usable", lambda device: True)
    monkeypatch.setattr(packed, "dequantise", lambda weight, dtype: reference_dequantise(weight).to(dtype))
    weight = weight_of(stored, 300, 256, block=(128, 128))
    for count in (1, 8, 13):
        rows = torch.arange(count) * 22
        assert torch.equal(rows_of(weight, rows, torch.float32), reference_dequantise(weight)[rows])


@pytest.mark.parametrize("stored", ["Q5_K", "F8_E4M3"])
def test_a_part_lies_in_the_same_memory(stored: str) -> None:
    weight = weight_of(stored, 5, 256, 256, block=(32, 128))
    part = cut(weight, [slice(2, 4), slice(64, 160)])
    assert part.shape == (2, 96, 256)
    assert torch.equal(reference_dequantise(part), reference_dequantise(weight)[2:4, 64:160])
    for plane in part.planes:
        plane.zero_()
    assert not reference_dequantise(weight)[2:4, 64:160].any()
    assert reference_dequantise(weight)[2:4, 160:].any()
