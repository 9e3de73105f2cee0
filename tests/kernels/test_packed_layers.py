"""Layers that hold packed weights, by way of the kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lazyio.engine.layers import linear, packed
from lazyio.engine.layers.linear import Joined, Linear
from lazyio.engine.layers.packed import Weight, cut, rows_of, times
from lazyio.kernels.packed import PackedWeight, random, reference_dequantise


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, packed):
        monkeypatch.setattr(module, "usable", lambda device: True)


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


def layer_of(weight: Weight) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0])
    del layer.weight
    layer.weight = weight
    return layer


@pytest.mark.parametrize(("tokens", "products"), [(1, 3), (3, 3), (16, 3), (17, 5)])
def test_layers_of_one_x(tokens: int, products: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator(device).manual_seed(6)
    whole, other = (random(stored, (rows, 256), device, made, 0.1) for stored, rows in (("Q4_0", 64), ("Q6_K", 20)))
    plain = torch.nn.Parameter(torch.randn(3, 256, generator=made, device=device), requires_grad=False)
    parts = [cut(whole, [slice(start, stop)]) for start, stop in ((0, 24), (24, 40), (40, 64))]
    layers = [layer_of(weight) for weight in (*parts, other, plain)]
    x = torch.randn(tokens, 256, generator=made, device=device)
    expected, multiplied, times_of = [layer(x) for layer in layers], [], linear.times
    monkeypatch.setattr(linear, "times", lambda x, weight: multiplied.append(weight) or times_of(x, weight))
    together = Joined(*layers)
    found = together(x)
    assert len(multiplied) == products
    assert [one.shape for one in found] == [one.shape for one in expected]
    assert all(map(torch.equal, found, expected))
    layers[1].weight = cut(whole, [slice(0, 16)])
    assert torch.equal(together(x)[1], layers[1](x))
