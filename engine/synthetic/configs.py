"""Configurations of models to make: of the sizes that were released, and tiny ones with every part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lazyio.errors import SettingError
from lazyio.ple.ngram import derive_constants
from lazyio.ple.spec import NgramHash

Config = dict[str, Any]

#: What can be made, as config.json calls it.
ARCHITECTURES = ("gemma3n", "gemma4", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
SIZES = ("tiny", "true")

# Rows of a table of n-grams are padded to a multiple of it.
_DIVISIBLE_BY = 128

_QWEN: Config = {
    "attention_bias": False,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_GEMMA: Config = {
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_TINY_QWEN: Config = {
    **{"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_TINY_EXPERTS: Config = {
    **{"num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
_TRUE_QWEN: Config = {
    **{"vocab_size": 248_320, "head_dim": 256, "linear_num_key_heads": 16},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
_TINY_GEMMA: Config = {
    **{"vocab_size": 4096, "vocab_size_per_layer_input": 4096, "max_position_embeddings": 32_768},
    **{"hidden_size": 64, "hidden_size_per_layer_input": 64, "intermediate_size": 96, "num_hidden_layers": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"sliding_window": 16, "num_kv_shared_layers": 4},
}

# By architecture and size, what differs; `period` is how often a layer has full attention.
_OWN: dict[tuple[str, str], Config] = {
    ("qwen3_5", "tiny"): _TINY_QWEN | {"intermediate_size": 96},
    ("qwen3_5_moe", "tiny"): _TINY_QWEN | _TINY_EXPERTS,
    ("qwen4_exp", "tiny"): _TINY_QWEN
    | _TINY_EXPERTS
    | {"hc_lowrank": 16, "indexer_n_heads": 2, "indexer_head_dim": 16, "indexer_budget": 64}
    | {"ple_embed_dim": 256, "heads_per_ngram": 4},
    ("qwen3_5", "true"): _TRUE_QWEN
    | {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 17_408}
    | {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
    ("qwen3_5_moe", "true"): _TRUE_QWEN
    | {"hidden_size": 2048, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32},
    ("qwen4_exp", "true"): _TRUE_QWEN
    | {"hidden_size": 2560, "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10}
    | {"moe_intermediate_size": 640, "shared_expert_intermediate_size": 640}
    | {"num_attention_heads": 24, "num_key_value_heads": 2, "linear_num_value_heads": 48}
    | {"hc_lowrank": 320, "indexer_n_heads": 4, "indexer_head_dim": 128, "indexer_budget": 2048}
    | {"ple_embed_dim": 2560, "heads_per_ngram": 8},
    ("gemma4", "tiny"): _TINY_GEMMA | {"global_head_dim": 64},
    ("gemma3n", "tiny"): _TINY_GEMMA | {"vocab_size": 4160, "laurel_rank": 8},
    ("gemma4", "true"): {"vocab_size": 262_144, "vocab_size_per_layer_input": 262_144}
    | {"hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "num_hidden_layers": 35}
    | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512}
    | {"sliding_window": 512, "num_kv_shared_layers": 20, "max_position_embeddings": 131_072},
    ("gemma3n", "true"): {"vocab_size": 262_400, "vocab_size_per_layer_input": 262_144}
    | {"hidden_size": 2048, "hidden_size_per_layer_input": 256, "intermediate_size": 8192, "num_hidden_layers": 30}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "laurel_rank": 64}
    | {"sliding_window": 512, "num_kv_shared_layers": 10, "max_position_embeddings": 32_768},
}
_NGRAM_ROWS = {"tiny": 32_768, "true": 320_001_536}
_PERIODS = {"qwen": 4, "gemma": 5}
_TINY_GEMMA_PERIOD = 2


@dataclass(frozen=True, slots=True)
class Table:
    """The table of a model to make: `tensor` is its name in transformers, `ngram` what its row ids are made with."""

    tensor: str
    rows: int
    row_values: int
    ngram: NgramHash | None


def config_of(
    architecture: str, size: str, end: int, vocab: int, layers: int | None = None, rows: int | None = None
) -> tuple[Config, Table | None]:
    """The text configuration in transformers' form, and the table, None for a model without one.

    `end` is the token that ends a text, `vocab` how many a tokenizer has. `layers` and `rows` change the size; a table
    of n-grams gets the most of `rows` that heads of prime sizes fill, and padding as in the release.
    Raises SettingError for what there is not, or what can't be made of so many layers or rows.
    """
    if architecture not in ARCHITECTURES or size not in SIZES:
        known = f"{', '.join(ARCHITECTURES)}, and the sizes {' and '.join(SIZES)}"
        raise SettingError(f"there is no {architecture} of the size {size}; there are {known}")
    own = dict(_OWN[architecture, size])
    own |= {"model_type": f"{architecture}_text", "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    if layers is not None:
        own |= _layers(own, architecture, size, layers)
    if vocab > own["vocab_size"]:
        raise SettingError(f"a tokenizer of {vocab} tokens is more than the {own['vocab_size']} of the model")
    if architecture.startswith("gemma"):
        return _gemma(own, architecture, size, rows)
    config = _qwen(own, size)
    if architecture == "qwen4_exp":
        return _qwen4_exp(config, end, _NGRAM_ROWS[size] if rows is None else rows)
    if rows is not None:
        raise SettingError(f"{architecture} has no table, and so no rows; leave their number out")
    return config, None


def _layers(own: Mapping[str, Any], architecture: str, size: str, layers: int) -> Config:
    """So many layers; of those that share keys and values, the same part, with one of each kind before them."""
    least = 2 if architecture == "qwen4_exp" else 1 if architecture.startswith("qwen") else _period(architecture, size)
    if layers < least:
        raise SettingError(f"{architecture} of the size {size} can be made with {least} layers or more; got {layers}")
    changed = {"num_hidden_layers": layers}
    if "num_kv_shared_layers" in own:
        part = own["num_kv_shared_layers"] * layers // own["num_hidden_layers"]
        changed["num_kv_shared_layers"] = min(part, layers - least)
    return changed


def _period(architecture: str, size: str) -> int:
    if architecture.startswith("qwen"):
        return _PERIODS["qwen"]
    return _TINY_GEMMA_PERIOD if size == "tiny" else _PERIODS["gemma"]


def _kinds(layers: int, period: int, others: str) -> list[str]:
    return [others if number % period else "full_attention" for number in range(1, layers + 1)]


def _qwen(own: Config, size: str) -> Config:
    rotated = own["head_dim"] // 8  # pairs: a quarter of the values
    sections = [-(-rotated * 11 // 32), -(-rotated * 10 // 32)]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}
    return {
        **_QWEN,
        **own,
        "layer_types": _kinds(own["num_hidden_layers"], _PERIODS["qwen"], "linear_attention"),
        "rope_parameters": rope | {"mrope_section": [*sections, rotated - sum(sections)]},
    }


def _qwen4_exp(config: Config, end: int, rows: int) -> tuple[Config, Table]:
    per_ngram, ngram_size = config["heads_per_ngram"], 3
    heads = per_ngram * (ngram_size - 1)
    ngram = derive_constants(
        rows, vocab=config["vocab_size"], eos=end, ngram_size=ngram_size, heads_per_ngram=per_ngram
    )
    addressed = sum(ngram.head_sizes)
    config |= {
        "hc_count": 4,
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 4,
        "make_ngram_vocab_size_divisible_by": _DIVISIBLE_BY,
        "ngram_size": ngram_size,
        "ngram_vocab_size_base": ngram.head_sizes[0],
        "output_gate_type": "sigmoid",
        "ple_conv_kernel_size": 4,
        "ple_layer_ids": [2],
    }
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    padded = -(-addressed // _DIVISIBLE_BY) * _DIVISIBLE_BY
    return config, Table(name, padded, config["ple_embed_dim"] // heads, ngram)


def _gemma(own: Config, architecture: str, size: str, rows: int | None) -> tuple[Config, Table]:
    layers, period = own["num_hidden_layers"], _period(architecture, size)
    config = {**_GEMMA, **own, "layer_types": _kinds(layers, period, "sliding_attention")}
    if rows is not None:
        config["vocab_size_per_layer_input"] = rows
    rows = config["vocab_size_per_layer_input"]
    if architecture == "gemma4":
        config |= {"attention_k_eq_v": False, "enable_moe_block": False, "use_double_wide_mlp": True}
        if rows < config["vocab_size"]:
            raise SettingError(f"a table of gemma4 has a row for each of the {config['vocab_size']} tokens; got {rows}")
    else:
        sparse = 10 * layers // 30
        config |= {
            "activation_sparsity_pattern": [0.95] * sparse + [0.0] * (layers - sparse),
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
        }
    full = {"rope_type": "default", "rope_theta": 1e6}
    if architecture == "gemma4":
        full |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    config["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": full,
    }
    row_values = layers * config["hidden_size_per_layer_input"]
    return config, Table("model.embed_tokens_per_layer.weight", rows, row_values, None)
