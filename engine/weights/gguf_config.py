"""The configuration of a GGUF model, in the form of transformers' config.json.

Models are built from that form alone, so that there is one description of each whatever the file. What the metadata
leave out is what the architecture fixes; keys and defaults are those of llama.cpp.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from lazyio.errors import ModelError
from lazyio.ple.checkpoint import read_tensor
from lazyio.ple.gguf import GgufCheckpoint
from lazyio.ple.gguf_header import Value, described


def config_of(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    """The text configuration of a model. Raises ModelError for other architectures, and for keys that are missing."""
    make = _CONFIGS.get(checkpoint.architecture or "")
    if make is None:
        raise ModelError(
            f"{checkpoint.path} is a model of the architecture {checkpoint.architecture!r}, which can't be run here; "
            f"these can: {', '.join(_CONFIGS)}"
        )
    return make(_Keys(checkpoint))


class _Keys:
    """The metadata of a model, by key without the architecture in front."""

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self.checkpoint = checkpoint

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._of(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value != int(value):
            raise self._wrong(key, "a whole number", value)
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._of(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        # Files have float32; the nearest short decimal is the number that was meant.
        return float(f"{value:.7g}")

    def array(self, key: str, count: int) -> tuple[Any, ...] | None:
        """One entry a layer, or None where the key is missing. What is said once holds for all layers."""
        value = self.checkpoint.metadata.get(self._full(key))
        if value is None:
            return None
        values = value if isinstance(value, tuple) else (value,) * count
        if len(values) < count:
            raise self._wrong(key, f"an array of {count}", value)
        return values[:count]

    def rows(self, tensor: str) -> int:
        """The length of the first dimension of a tensor."""
        if tensor not in self.checkpoint.names:
            raise ModelError(f"{self.checkpoint.path} has no tensor {tensor}: it is no whole model")
        return self.checkpoint.tensor(tensor).shape[0]

    def _of(self, key: str, default: float | None) -> Value | None:
        value = self.checkpoint.metadata.get(self._full(key))
        return default if value is None else value

    def _full(self, key: str) -> str:
        return f"{self.checkpoint.architecture}.{key}"

    def _wrong(self, key: str, wanted: str, value: Value | None) -> ModelError:
        return ModelError(f"{self.checkpoint.path}: key {self._full(key)} must be {wanted} and is {described(value)}")


def _common(keys: _Keys, model_type: str) -> dict[str, Any]:
    metadata = keys.checkpoint.metadata
    return {
        "model_type": model_type,
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": keys.whole("embedding_length"),
        "num_hidden_layers": keys.whole("block_count") - keys.whole("nextn_predict_layers", 0),
        "num_attention_heads": keys.whole("attention.head_count"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.whole("context_length"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": "output.weight" not in keys.checkpoint.names,
    }


# --- Qwen ------------------------------------------------------------------------------------------------------------


def _qwen3_5(keys: _Keys, model_type: str = "qwen3_5_text") -> dict[str, Any]:
    config = _common(keys, model_type)
    head_dim, value_heads = keys.whole("attention.key_length"), keys.whole("ssm.time_step_rank")
    interval = keys.whole("full_attention_interval", 4)
    layers = range(1, config["num_hidden_layers"] + 1)
    return config | {
        "num_key_value_heads": _kv_heads(keys, config["num_hidden_layers"]),
        "head_dim": head_dim,
        "intermediate_size": keys.whole("feed_forward_length", 0),
        "hidden_act": "silu",
        "layer_types": ["linear_attention" if number % interval else "full_attention" for number in layers],
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_value_head_dim": keys.whole("ssm.inner_size") // value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base"),
            "partial_rotary_factor": keys.whole("rope.dimension_count") / head_dim,
        },
    }


def _kv_heads(keys: _Keys, layers: int) -> int:
    """Heads of keys and values, the same in all layers that have any."""
    heads = {count for count in keys.array("attention.head_count_kv", layers) or () if count}
    if len(heads) != 1:
        raise ModelError(
            f"{keys.checkpoint.path}: layers have {sorted(heads)} heads of keys and values; models with one number for "
            "all of them can be run here"
        )
    return int(heads.pop())


def _qwen3_5_moe(keys: _Keys, model_type: str = "qwen3_5_moe_text") -> dict[str, Any]:
    return _qwen3_5(keys, model_type) | {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen4_exp(keys: _Keys) -> dict[str, Any]:
    config = _qwen3_5_moe(keys, "qwen4_exp_text")
    per_ngram, ngram_size = keys.whole("ple.heads_per_ngram"), keys.whole("ple.ngram_size")
    layers = config["num_hidden_layers"]
    ratios = {ratio for ratio in keys.array("attention.compress_ratios", layers) or (4,) if ratio}
    if len(ratios) != 1:
        raise ModelError(f"{keys.checkpoint.path}: layers compress keys by {sorted(ratios)}; one ratio is supported")
    return config | {
        "output_gate_type": "sigmoid",
        "hc_count": keys.whole("hyper_connection.count"),
        "hc_lowrank": keys.whole("hyper_connection.low_rank"),
        "indexer_n_heads": keys.whole("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys.whole("attention.indexer.key_length"),
        "indexer_budget": keys.whole("attention.indexer.top_k"),
        "indexer_compress_ratio": int(ratios.pop()),
        # Layers are counted from 1 there, from 0 here.
        "ple_layer_ids": [number + 1 for number in keys.array("ple.layers", 1) or ()],
        "ple_conv_kernel_size": keys.whole("ple.conv_kernel"),
        "ple_embed_dim": keys.whole("embedding_length_per_layer_input") * per_ngram * (ngram_size - 1),
        "ngram_size": ngram_size,
        "heads_per_ngram": per_ngram,
        "eos_token_id": keys.whole("ple.eos_token_id"),
    }


# --- Gemma -----------------------------------------------------------------------------------------------------------


def _gemma(keys: _Keys, model_type: str) -> dict[str, Any]:
    config = _common(keys, model_type)
    layers, head_dim = config["num_hidden_layers"], keys.whole("attention.key_length")
    per_layer = keys.whole("embedding_length_per_layer_input", 0)
    return config | {
        "num_key_value_heads": _kv_heads(keys, layers),
        "head_dim": keys.whole("attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "layer_types": _sliding(keys, layers),
        "sliding_window": keys.whole("attention.sliding_window"),
        "num_kv_shared_layers": keys.whole("attention.shared_kv_layers", 0),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": keys.rows("per_layer_token_embd.weight") if per_layer else 0,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "rope_parameters": {
            "sliding_attention": _rope("default", keys.number("rope.freq_base_swa", 1e4)),
            "full_attention": _rope("default", keys.number("rope.freq_base")),
        },
    }


def _rope(kind: str, theta: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta}


def _sliding(keys: _Keys, layers: int) -> list[str]:
    """The kind of each layer: whether its attention slides, as an array has it, or all but every n-th, by default 5."""
    pattern = keys.array("attention.sliding_window_pattern", layers)
    if pattern is None or not isinstance(pattern[0], bool):
        period = 5 if pattern is None else int(pattern[0])
        pattern = tuple(bool(number % period) for number in range(1, layers + 1))
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _gemma4(keys: _Keys) -> dict[str, Any]:
    config = _gemma(keys, "gemma4_text")
    if keys.whole("expert_count", 0):
        raise ModelError(f"{keys.checkpoint.path} is a Gemma 4 with experts; those without can be run here")
    widths = keys.array("feed_forward_length", config["num_hidden_layers"]) or (keys.whole("feed_forward_length"),)
    config["rope_parameters"]["full_attention"] |= _proportional(keys, config["global_head_dim"])
    return config | {
        "intermediate_size": int(widths[0]),
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "enable_moe_block": False,
        "attention_k_eq_v": False,
    }


def _proportional(keys: _Keys, head_dim: int) -> dict[str, Any]:
    """The rope of full layers: rope_freqs divides the frequency of each pair, by 1 or by what stops it."""
    checkpoint = keys.checkpoint
    if "rope_freqs.weight" not in checkpoint.names:
        return {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    divisors = struct.unpack(f"<{head_dim // 2}f", read_tensor(checkpoint.tensor("rope_freqs.weight")))
    rotated = sum(divisor == 1 for divisor in divisors)
    if any(divisor < 1e20 for divisor in divisors[rotated:]):
        raise ModelError(f"{checkpoint.path}: rope_freqs.weight has divisors other than 1 and 1e30")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}


def _gemma3n(keys: _Keys) -> dict[str, Any]:
    config = _gemma(keys, "gemma3n_text")
    layers = config["num_hidden_layers"]
    return config | {
        "intermediate_size": [int(width) for width in keys.array("feed_forward_length", layers) or ()],
        "laurel_rank": keys.rows("blk.0.laurel_l.weight"),
        "altup_num_inputs": keys.whole("altup.num_inputs", 4),
        "altup_active_idx": keys.whole("altup.active_idx", 0),
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "activation_sparsity_pattern": _sparsity(keys, layers),
    }


def _sparsity(keys: _Keys, layers: int) -> list[float]:
    """The share of activations that each layer sets to 0: files have the quantile of a normal distribution for it."""
    scales = keys.array("activation_sparsity_scale", layers)
    if scales is None:
        return [0.95 if number < 10 else 0.0 for number in range(layers)]
    return [round(NormalDist().cdf(scale), 6) if math.isfinite(scale) else 0.0 for scale in scales]


_CONFIGS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "qwen4exp": _qwen4_exp,
}
