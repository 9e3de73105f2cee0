from __future__ import annotations

import pytest
import torch

from lazyio.engine.layers import moe as layers
from lazyio.errors import Unsupported
from lazyio.kernels.route import route, supports

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter


def test_of_equal_ones_the_lowest_number_comes_first(device: torch.device):
    weights, chosen = route(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5], device=device), 4, True)
    assert chosen.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full_like(weights[1], 0.25))


def test_what_is_no_number_is_seen_and_names_experts_that_there_are(device: torch.device):
    logits = torch.randn(3, 13, generator=torch.Generator().manual_seed(0)).to(device)
    expected = route(logits, 4, True)
    logits[1, 5], logits[2] = torch.nan, -torch.inf
    weights, chosen = route(logits, 4, True)
    assert weights[1:].isnan().all()
    assert all(len(set(row)) == 4 and max(row) < 13 for row in chosen.tolist())
    assert torch.equal(weights[0], expected[0][0])


def test_probabilities_that_are_too_small_for_a_float_are_still_in_order(device: torch.device):
    logits = torch.tensor([[0.0, 500.0, 300.0, -10.0]], device=device)
    weights, chosen = route(logits, 3, True)
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
    assert chosen[0, 0] == 1
    assert sorted(set(chosen[0].tolist())) == sorted(chosen[0].tolist())


def test_no_tokens(device: torch.device):
    weights, chosen = route(torch.empty(0, 5, device=device), 2, True)
    assert weights.shape == chosen.shape == (0, 2)


def test_what_has_no_kernel():
    assert supports(torch.bfloat16, 2048)
    with pytest.raises(Unsupported, match=r"2,049 experts by logits of torch.float32"):
        route(torch.zeros(1, 2049), 1, True)
    with pytest.raises(Unsupported, match=r"torch.float64"):
        route(torch.zeros(1, 9, dtype=torch.float64), 1, True)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_layer_takes_the_kernel_where_there_is_one(
    normalise: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    layer = layers.SparseMoe(32, 7, 3, 16, 16, normalise).to(device).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator(device).manual_seed(1))
    x = torch.randn(2, 32, generator=torch.Generator(device).manual_seed(2), device=device)
    monkeypatch.setattr(layers, "usable", lambda of: False)
    expected, launched = layer(x), []

    def counted(*arguments: object) -> object:
        launched.append(arguments[1:])
        return route(*arguments)

    monkeypatch.setattr(layers, "usable", lambda of: True)
    monkeypatch.setattr(layers.route, "route", counted)
    torch.testing.assert_close(layer(x), expected)
    assert launched == [(3, normalise)]
