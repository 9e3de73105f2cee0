"""What the generations of Qwen have in common: the parts of a layer, read from a configuration, and the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lazyio.engine.layers.gated_attention import GatedAttention
from lazyio.engine.layers.gated_delta_net import GatedDeltaNet
from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.moe import SparseMoe
from lazyio.engine.layers.rope import Rope
from lazyio.engine.models.base import Model
from lazyio.engine.models.config import Config
from lazyio.engine.ubatch import Rows, Ubatch

LINEAR, FULL = "linear_attention", "full_attention"

# What configurations of all generations mean by a key that they leave out.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}


class Qwen(Model):
    """A text model of the family: `text` is everything but the head, what transformers calls `model`."""

    row_values = 0

    def __init__(self, config: Config, text: nn.Module) -> None:
        """Raises ModelError for a configuration that does not fit."""
        super().__init__()
        self.model = text
        self.vocab, self.max_tokens = config.integer("vocab_size"), config.integer("max_position_embeddings")
        self.lm_head = Linear(config.integer("hidden_size"), self.vocab)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.flag("tie_word_embeddings") else {}
        self.float32 = frozenset(name for name, _ in self.named_parameters() if name.endswith((".A_log", ".dt_bias")))

    def forward(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        """See `Model`."""
        hidden: torch.Tensor = self.model(ubatch, rows)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()


def configuration(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    """The configuration `given`, with `defaults` and those of the family in the place of what is absent or null.

    Raises ModelError for what no model of the family can be.
    """
    config = Config({**_DEFAULTS, **defaults, **{key: value for key, value in given.items() if value is not None}})
    config.expect(hidden_act="silu", attention_bias=False, attn_output_gate=True, mamba_ssm_dtype="float32")
    return config


def layer_types(config: Config, *attention: str) -> list[str]:
    """Of each layer, LINEAR or one of the names `attention`, of which the first is that of every so many layers."""
    layers, interval = config.integer("num_hidden_layers"), config.integer("full_attention_interval")
    every = [LINEAR if (layer + 1) % interval else attention[0] for layer in range(layers)]
    return config.names("layer_types", (LINEAR, *attention), layers, every)


def rope(config: Config) -> Rope:
    """The rope of the first part of each head. Text has its three position ids equal: its sections do not matter."""
    given = config.part("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    given.expect(rope_type="default", type="default")
    theta = given.number("rope_theta", config.number("rope_theta", 10_000.0))
    factor = given.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.25))
    head_dim = config.integer("head_dim")
    rotated = int(head_dim * factor)
    if factor > 1 or rotated < 2 or rotated % 2:
        must = f"it must leave an even number of a head's {head_dim} values to rotate, and at least 2"
        raise given.error("partial_rotary_factor", must)
    return Rope(theta, rotated)


def delta_net(config: Config, gate: str) -> GatedDeltaNet:
    """The mixer of a linear layer; `gate` is "silu" or "sigmoid"."""
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", f"it must be a multiple of the {key_heads} key heads")
    return GatedDeltaNet(
        config.integer("hidden_size"),
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
        config.number("rms_norm_eps"),
        gate,
    )


def attention(config: Config, selection: nn.Module | None = None) -> GatedAttention:
    """The mixer of an attention layer; see GatedAttention for `selection`."""
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"it must be a multiple of the {kv_heads} heads of keys")
    hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    return GatedAttention(hidden, heads, kv_heads, config.integer("head_dim"), eps, selection)


def experts(config: Config) -> SparseMoe:
    """The feed-forward part of a layer that has experts."""
    count, chosen = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if chosen > count:
        raise config.error("num_experts_per_tok", f"there are {count} experts")
    width, shared_width = (config.integer(key) for key in ("moe_intermediate_size", "shared_expert_intermediate_size"))
    normalise = config.flag("norm_topk_prob", True)
    return SparseMoe(config.integer("hidden_size"), count, chosen, width, shared_width, normalise)
