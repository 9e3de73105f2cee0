from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyio.engine.models import model_class
from lazyio.engine.models.gemma4 import Gemma4
from lazyio.errors import ModelError

# As released: E2B, E4B, and a dense one without a table whose full attention has values that are keys.
E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "final_logit_softcapping": 30.0,
}
E4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "final_logit_softcapping": 30.0,
}
DENSE = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def built(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return model_class("gemma4_text").from_config(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
        {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "final_logit_softcapping": None},
        {"tie_word_embeddings": False, "sliding_window": 3, "num_kv_shared_layers": 1, "num_hidden_layers": 4},
    ],
    ids=["no table", "values are keys", "all have keys", "a head of its own"],
)
def test_other_configurations(tiny: Callable[..., Any], check_logits: Callable[[Any], None], changes: dict[str, Any]):
    if "num_hidden_layers" in changes:
        changes = changes | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2}
        changes["layer_types"] = changes["layer_types"][: changes["num_hidden_layers"]]
    check_logits(tiny("gemma4", **changes))


def test_only_layers_with_keys_have_state_and_sliding_ones_of_a_window(tiny: Callable[..., Any]):
    model = tiny("gemma4").model
    short, long = model.new_state(100), model.new_state(1000)
    assert len(long.pieces) == 3
    grown = [b.nbytes - a.nbytes for a, b in zip(short.pieces.values(), long.pieces.values(), strict=True)]
    assert grown == [0, 0, 2 * 900 * 32 * 4]


@pytest.mark.parametrize("released", [E2B, E4B, DENSE], ids=["E2B", "E4B", "dense"])
def test_parameters_of_released_sizes_are_those_of_transformers(released: dict[str, Any]):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    with torch.device("meta"):
        reference = Gemma4ForCausalLM(Gemma4TextConfig(**released))
    model = built(released)
    expected = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items() if name != model.table}
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    assert model.row_values == (0 if model.table is None else reference.state_dict()[model.table].shape[1])
    assert model.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.max_tokens == 131_072


def test_the_last_layer_sees_all_keys_whatever_the_configuration_says():
    model = built(E2B | {"layer_types": (["full_attention"] + ["sliding_attention"] * 4) * 7})
    sizes = [layer.self_attn.q_norm.weight.shape[0] for layer in model.model.layers]
    assert sizes == ([512] + [256] * 4) * 6 + [512, 256, 256, 256, 512]


def test_a_null_width_of_inputs_is_none():
    model = built(DENSE | {"hidden_size_per_layer_input": None})
    assert model.table is None
    assert model.row_values == 0


def test_the_layers_that_differ_may_be_told_by_number():
    by_number = {f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 4} for layer in (5, 11)}
    told = {key: value for key, value in DENSE.items() if key != "num_global_key_value_heads"}
    shapes = [
        {name: tensor.shape for name, tensor in built(config).state_dict().items()}
        for config in (DENSE, told | {"per_layer_config": by_number})
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block = True; only false"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'; it must be \"vision\""),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input = 1000; the table must have a row"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 8; it must be a multiple of the 3"),
        ({"head_dim": 33}, "heads of 33 values"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers = 35; of 35 layers"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers = 31; of 35 layers"),
        ({"num_kv_shared_layers": 99}, "num_kv_shared_layers = 99; of 35 layers"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 35}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, r"rope_parameters\.full_attention\.rope_type"),
        ({"rope_parameters": {"full_attention": {"factor": 8.0, "rope_type": "proportional"}}}, "attention.factor = 8"),
        ({"rope_parameters": {"full_attention": ROPE | {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": ROPE}}, r"lacks rope_parameters\.sliding_attention\.rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"lacks .*\.rope_theta"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config = .*full_attention must have heads"),
        ({"per_layer_config": {"4": {"intermediate_size": 5}}}, r"per_layer_config\.4\.intermediate_size = 5"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        Gemma4.from_config(E2B | changes)
