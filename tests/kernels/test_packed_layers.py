"""Layers that hold packed weights, by way of the kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lazyio.engine.layers import packed
from lazyio.engine.layers.packed import rows_of, times
from lazyio.kernels.packed import PackedWeight, random, reference_dequantise


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "usable", lambda device: True)


def weight_of(stored: str, device: torch.device) -> PackedWeight:
    return random(stored, (70, 256), device, torch.Generator(device).manual_seed(4), 0.1, (128, 128))


@pytest.mark.parametrize("stored", ["Q4_0", "Q6_K", "F8_E4M3"])
@pytest.mark.parametrize("tokens", [1, 16, 20])
def test_products(stored: str, tokens: int, device: torch.device) -> None:
    weight = weight_of(stored, device)
    x = torch.randn(256, 2, tokens, generator=torch.Generator().manual_seed(5)).to(device).permute(1, 2, 0)
    found = times(x, weight)
    expected = functional.linear(x, reference_dequantise(weight))
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["Q4_1", "Q5_K", "F8_E4M3"])
def test_rows(stored: str, device: torch.device) -> None:
    weight = weight_of(stored, device)
    for count in (1, 8, 11):
        rows = torch.arange(count, device=device) * 6
        assert torch.equal(rows_of(weight, rows, torch.float32), reference_dequantise(weight)[rows])
