from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lazyio.engine.layers import moe
from lazyio.engine.layers.moe import SparseMoe

HIDDEN, EXPERTS, CHOSEN, WIDTH, SHARED = 16, 12, 3, 8, 24


def layer_of(dtype: torch.dtype = torch.float32, *, normalise: bool = True) -> SparseMoe:
    layer = SparseMoe(HIDDEN, EXPERTS, CHOSEN, WIDTH, SHARED, normalise)
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        parameter.data = (0.4 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return layer.requires_grad_(False)


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(6))


def feed_forward(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    inner = gate @ x
    return down @ (inner * inner.sigmoid() * (up @ x))


def as_written(layer: SparseMoe, x: torch.Tensor, *, normalise: bool = True) -> torch.Tensor:
    """The formulas of the class, token by token, in float64."""
    w = {name: parameter.double() for name, parameter in layer.named_parameters()}
    found = []
    for token in x.double():
        probabilities = (w["gate.weight"] @ token).softmax(0)
        chosen = probabilities.argsort(descending=True)[:CHOSEN].tolist()
        y = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert in chosen:
            weight = probabilities[expert] / (probabilities[chosen].sum() if normalise else 1.0)
            gate, up = w["experts.gate_up_proj"][expert].chunk(2)
            y += weight * feed_forward(token, gate, up, w["experts.down_proj"][expert])
        shared = feed_forward(token, *(w[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
        found.append(y + (w["shared_expert_gate.weight"] @ token).sigmoid() * shared)
    return torch.stack(found)


@pytest.fixture(params=["expert by expert", "grouped"])
def dispatch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to multiply, whatever this machine would take."""
    if request.param == "grouped":
        if not hasattr(functional, "grouped_mm"):
            pytest.skip("this torch multiplies no groups")
        monkeypatch.setattr(moe, "_grouped", lambda x, down_proj: True)


@pytest.mark.usefixtures("dispatch")
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_the_formulas(tokens: int, normalise: bool):
    layer, x = layer_of(normalise=normalise), inputs(tokens)
    expected = as_written(layer, x, normalise=normalise)
    found = layer(x)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.usefixtures("dispatch")
def test_all_tokens_take_the_same_experts():
    layer, x = layer_of(), inputs(1).expand(9, -1)
    expected = as_written(layer, x)
    assert (layer(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.usefixtures("dispatch")
@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision(dtype: torch.dtype, within: float):
    layer, x = layer_of(dtype), inputs(20).to(dtype)
    found = layer(x)
    assert found.dtype == dtype
    error = (found - as_written(layer, x)).norm(dim=-1) / as_written(layer, x).norm(dim=-1)
    # Logits are in the dtype too, and two that are nearly the same may change places.
    assert error.median() <= within


def test_experts_that_nobody_chose_are_not_touched():
    layer, x = layer_of(), inputs(2)
    expected = layer(x)
    chosen = layer.gate(x).topk(CHOSEN).indices
    others = [expert for expert in range(EXPERTS) if expert not in chosen]
    assert others
    layer.experts.gate_up_proj.data[others] = torch.nan
    layer.experts.down_proj.data[others] = torch.nan
    assert torch.equal(layer(x), expected)


def test_the_host_reads_how_many_tokens_each_expert_has_once(monkeypatch: pytest.MonkeyPatch):
    reads = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> object:
        reads.append(tensor.shape)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    layer_of()(inputs(7))
    assert reads == [(EXPERTS,)]


def test_float16_does_not_end_before_the_weight_of_an_expert_is_applied():
    layer = layer_of(torch.float16)
    for name, value in (("gate", 0.0), ("experts.gate_up_proj", 18.0), ("experts.down_proj", 1 / 64)):
        layer.get_parameter(name if "." in name else f"{name}.weight").data.fill_(value)
    layer.shared_expert.down_proj.weight.data.zero_()
    x = torch.ones(3, HIDDEN, dtype=torch.float16)
    inner = (18.0 * HIDDEN) ** 2  # silu(a) = a here
    assert inner / CHOSEN < torch.finfo(torch.float16).max < inner
    torch.testing.assert_close(layer(x), torch.full_like(x, inner * WIDTH / 64), rtol=2e-3, atol=0)
