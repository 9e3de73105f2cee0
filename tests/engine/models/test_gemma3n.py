from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyio.engine.models import model_class
from lazyio.engine.models.gemma3n import Gemma3n
from lazyio.errors import ModelError

E4B: dict[str, Any] = {}  # the defaults
E2B = {
    "intermediate_size": [8192] * 30,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
}


def built(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return model_class("gemma3n_text").from_config(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"altup_num_inputs": 2, "altup_correct_scale": False},
        {"num_kv_shared_layers": 0, "final_logit_softcapping": 5.0},
        {"intermediate_size": [96, 32, 64, 96, 96, 8], "sliding_window": 3, "activation_sparsity_pattern": [0.7] * 6},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    ],
    ids=["two streams", "all have keys", "widths", "rope"],
)
def test_other_configurations(tiny: Callable[..., Any], check_logits: Callable[[Any], None], changes: dict[str, Any]):
    check_logits(tiny("gemma3n", **changes))


def test_ids_without_a_row_of_their_own_have_the_first(tiny: Callable[..., Any], agree: Callable[..., None]):
    pair = tiny("gemma3n")
    tokens = [3, 239, 240, 255, 7, 241, 9]
    assert pair.model.row_vocab == 240
    without = pair.model.vocab - pair.model.row_vocab
    first = pair._replace(table=torch.cat([pair.table, pair.table[:1].expand(without, -1)]))
    agree(first.logits(tokens), pair.expected(tokens))
    other = pair._replace(table=torch.cat([pair.table, pair.table[1:2].expand(without, -1)]))
    with pytest.raises(AssertionError):
        agree(other.logits(tokens), pair.expected(tokens))


def test_a_table_with_a_row_for_each_id_needs_no_such_thing():
    assert built({"vocab_size": 262_144}).row_vocab is None
    assert built({}).row_vocab == 262_144


@pytest.mark.parametrize("released", [E2B, E4B], ids=["E2B", "E4B"])
def test_parameters_of_released_sizes_are_those_of_transformers(released: dict[str, Any]):
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    with torch.device("meta"):
        reference = Gemma3nForCausalLM(Gemma3nTextConfig(**released))
    model = built(released)
    expected = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items() if name != model.table}
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    assert model.row_values == reference.state_dict()[model.table].shape[1]
    assert model.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    sparse = [layer.mlp._quantile is not None for layer in model.model.layers]
    assert sparse == [layer.mlp.activation_sparsity > 0 for layer in reference.model.layers]


def test_bases_of_rotation_may_be_keys_of_their_own(tiny: Callable[..., Any]):
    pair = tiny("gemma3n", rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 500.0}})
    config = {key: value for key, value in pair.config.items() if key != "rope_parameters"}
    flat = Gemma3n.from_config(config | {"rope_theta": 500.0, "rope_local_base_freq": 10_000.0})
    flat.load_state_dict(pair.model.state_dict())
    tokens = pair.tokens(29)
    found = pair._replace(model=flat.requires_grad_(False)).logits(tokens)
    assert torch.equal(found, pair.logits(tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx = 1; only 0"),
        ({"altup_num_inputs": 1}, "altup_num_inputs = 1; it must be an integer, 2 or more"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input = 0"),
        ({"intermediate_size": [8192] * 3}, "intermediate_size = .*a list of 30 integers"),
        ({"activation_sparsity_pattern": [0.5] * 3}, "activation_sparsity_pattern = .*a list of 30 numbers"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "activation_sparsity_pattern = .*below 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, r"full_attention\.rope_type = 'linear'"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers = 30; of 30 layers"),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        Gemma3n.from_config(E2B | changes)
