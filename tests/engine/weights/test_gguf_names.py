"""Names of GGUF tensors, and changes that undo each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyio.engine.weights.gguf_names import GgufNames, Stored

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen4_exp", "gemma4", "gemma3n")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tiny: Callable[..., Any]) -> Any:
    return tiny(request.param)


def ways(model: Any) -> list[tuple[torch.Tensor, tuple[Stored, ...]]]:
    names, state = GgufNames(model.config), model.model.state_dict()
    return [(state[name], way) for name in state if name not in model.model.tied for way in names.of(name)]


def test_what_is_stored_is_undone(model: Any) -> None:
    for values, way in ways(model):
        rebuilt = torch.full_like(values, float("nan"))
        for stored in way:
            part = values[stored.into]
            there = part if stored.do is None else stored.do(part)
            rebuilt[stored.into] = there if stored.undo is None else stored.undo(there)
        torch.testing.assert_close(rebuilt, values, rtol=1e-6, atol=1e-6)


def test_every_parameter_has_tensors_of_its_own(model: Any) -> None:
    stored = [(each.name, each.place) for _, way in ways(model) for each in way]
    parameters = [name for name in model.model.state_dict() if name not in model.model.tied]
    assert all(GgufNames(model.config).of(name) for name in parameters)
    assert len(set(stored)) == len(stored)


def test_an_unknown_parameter_has_none(tiny: Callable[..., Any]) -> None:
    names = GgufNames(tiny("gemma4").config)
    assert names.of("model.layers.0.other.weight") == names.of("other") == []


def test_the_order_of_value_heads() -> None:
    config = {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 1,
        "linear_value_head_dim": 2,
    }
    names = GgufNames(config)
    do = names.of("model.layers.0.linear_attn.dt_bias")[0][0].do
    assert do is not None
    # Value heads 0 to 2 share key head 0 and 3 to 5 key head 1; stored, one of each key head takes its turn.
    assert do(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    qkv = names.of("model.layers.0.linear_attn.in_proj_qkv.weight")[0][0].do
    assert qkv is not None
    rows = qkv(torch.arange(16)[:, None])[:, 0].tolist()
    assert rows == [0, 1, 2, 3, 4, 5, 10, 11, 6, 7, 12, 13, 8, 9, 14, 15]
    out = names.of("model.layers.0.linear_attn.out_proj.weight")[0][0].do
    assert out is not None
    assert out(torch.arange(12)[None])[0].tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


@pytest.mark.parametrize(
    ("parameter", "added"),
    [
        ("model.norm.weight", 1),
        ("model.layers.0.self_attn.q_norm.weight", 1),
        ("model.layers.0.self_attn.indexer.k_layernorm.weight", 1),
        ("model.layers.0.ple.norm_conv.weight", 1),
        ("model.hyper_connection_mixer.hc_norm.weight", 1),
        ("model.layers.0.linear_attn.norm.weight", 0),
        ("model.layers.0.ple.key_proj.weight", 0),
    ],
)
def test_zero_centred_norms_are_stored_with_1_added(parameter: str, added: float) -> None:
    stored = GgufNames({"model_type": "qwen4_exp_text"}).of(parameter)[0][0]
    values = torch.tensor([0.25, -2.0])
    assert torch.equal(values if stored.do is None else stored.do(values), values + added)
    assert GgufNames({"model_type": "gemma4_text"}).of("model.norm.weight")[0][0].do is None
