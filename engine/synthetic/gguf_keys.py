"""The metadata of a made model: its configuration and its tokenizer by the keys of GGUF files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from gguf import GGUFValueType, GGUFWriter

from lazyio.engine.synthetic.plan import Plan
from lazyio.engine.synthetic.tokenizer import CHAT_TEMPLATE, END, PRE, TURN_END, token_id

#: By what config.json calls them.
ARCHITECTURES = {
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen4_exp": "qwen4exp",
}

# Values of tokenizer.ggml.token_type.
_NORMAL, _CONTROL = 1, 3


def add_keys(writer: GGUFWriter, plan: Plan) -> None:
    """Add the metadata of a model to those of a file."""
    own = _common(plan) | _OF[plan.architecture](plan)
    for key, value in own.items():
        _add(writer, f"{ARCHITECTURES[plan.architecture]}.{key}", value)
    writer.add_string("general.type", "model")
    writer.add_string("general.name", f"Made {plan.architecture}")
    _add_tokenizer(writer, plan)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        # The package guesses a type that large integers do not fit in.
        kind = {bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT32}.get(type(value[0]), GGUFValueType.UINT64)
        if kind is GGUFValueType.UINT64 and max(value) < 2**32:
            kind = GGUFValueType.UINT32
        writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=kind)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _common(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }


def _qwen3_5(plan: Plan) -> dict[str, Any]:
    config = plan.config
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    return {
        **({"feed_forward_length": config["intermediate_size"]} if "intermediate_size" in config else {}),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "full_attention_interval": 4,
        "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "rope.freq_base": rope["rope_theta"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
    }


def _qwen3_5_moe(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return _qwen3_5(plan) | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


def _qwen4_exp(plan: Plan) -> dict[str, Any]:
    config, table = plan.config, plan.table
    assert table is not None
    assert table.ngram is not None
    ratio, kinds = config["indexer_compress_ratio"], config["layer_types"]
    return _qwen3_5_moe(plan) | {
        "attention.compress_ratios": [ratio if kind == "full_attention" else 0 for kind in kinds],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "embedding_length_per_layer_input": table.row_values,
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": table.ngram.eos,
        "ple.head_offsets": list(table.ngram.head_offsets),
        "ple.head_vocab_sizes": list(table.ngram.head_sizes),
        "ple.heads_per_ngram": table.ngram.heads_per_ngram,
        # Counted from 0 here, from 1 there.
        "ple.layers": [number - 1 for number in config["ple_layer_ids"]],
        "ple.layer_multipliers": list(table.ngram.multipliers),
        "ple.ngram_size": config["ngram_size"],
    }


def _gemma(plan: Plan) -> dict[str, Any]:
    config = plan.config
    rope, of_full = config["rope_parameters"], config.get("global_head_dim", config["head_dim"])
    return {
        "attention.key_length": of_full,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length": of_full,
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def _gemma4(plan: Plan) -> dict[str, Any]:
    layers, shared = plan.config["num_hidden_layers"], plan.config["num_kv_shared_layers"]
    width = plan.config["intermediate_size"]
    return _gemma(plan) | {"feed_forward_length": [width] * (layers - shared) + [2 * width] * shared}


def _gemma3n(plan: Plan) -> dict[str, Any]:
    config = plan.config
    return _gemma(plan) | {
        "activation_sparsity_scale": [_quantile(share) for share in config["activation_sparsity_pattern"]],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "feed_forward_length": [config["intermediate_size"]] * config["num_hidden_layers"],
    }


def _quantile(share: float) -> float:
    """What a share of activations that are set to 0 is told by: so many standard deviations over their mean."""
    return NormalDist().inv_cdf(share) if share else -math.inf


def _add_tokenizer(writer: GGUFWriter, plan: Plan) -> None:
    tokenizer = plan.tokenizer
    added = tokenizer.get_added_tokens_decoder()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([_CONTROL if number in added else _NORMAL for number in range(len(ids))])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(token_id(tokenizer, TURN_END))
    writer.add_pad_token_id(token_id(tokenizer, END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


_OF: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen4_exp": _qwen4_exp,
}
