"""Gemma 4: sliding and full attention, keys shared by the last layers, a row of the table for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from lazyio.engine.layers.geglu import GeGlu
from lazyio.engine.layers.kv_sharing import Kind, Sight
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.layers.per_layer_input import PerLayerInputs, TakesPerLayerInput
from lazyio.engine.layers.rope import Rope
from lazyio.engine.models.config import Config
from lazyio.engine.models.gemma import FULL, SLIDING, Attentions, Gemma, GemmaText, kind_of
from lazyio.engine.ubatch import Rows, Ubatch

# What a configuration leaves out: the defaults of Gemma4TextConfig in transformers.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 2304,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_kv_shared_layers": 0,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}


class Gemma4(Gemma):
    """The text part of Gemma 4, dense models only. Source: `Gemma4ForCausalLM` of transformers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """See `Model`."""
        read = Config(_DEFAULTS | _given(config))
        read.expect(enable_moe_block=False)
        if read.has("use_bidirectional_attention"):
            # "vision" is about the tokens of images: those of text see what comes before them.
            read.name("use_bidirectional_attention", ("vision",))
        return cls(read, _Text(read))


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the nulls, which stand for defaults; only a null width of inputs says that there are none."""
    given = {key: value for key, value in config.items() if value is not None}
    if "hidden_size_per_layer_input" in config:
        given.setdefault("hidden_size_per_layer_input", 0)
    return given


class _Text(GemmaText):
    def __init__(self, config: Config) -> None:
        width = config.integer("hidden_size_per_layer_input", least=0)
        attentions = _attentions(config)
        super().__init__(config, attentions, width, rounds=False)
        if width and config.integer("vocab_size_per_layer_input") < config.integer("vocab_size"):
            raise config.error("vocab_size_per_layer_input", "the table must have a row for each token of vocab_size")
        self.layers = nn.ModuleList(_Layer(config, self, layer) for layer in range(len(attentions.of_layers)))

    def forward(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        x = self.embedded(ubatch.tokens)
        hidden: torch.Tensor = self.norm(self.through_layers(x, ubatch, self.inputs(x, rows)))
        return hidden


class _Layer(TakesPerLayerInput):
    """x += norm(attention(norm(x))), then x += norm(mlp(norm(x))), then x += of its input, then x *= a scalar."""

    def __init__(self, config: Config, text: GemmaText, layer: int) -> None:
        hidden, eps = text.hidden, text.eps
        super().__init__(layer, hidden, text.width, eps)
        self.self_attn = text.attentions.new(layer, hidden, eps)
        wide = config.flag("use_double_wide_mlp", False) and layer >= text.attentions.with_keys
        self.mlp = GeGlu(hidden, config.integer("intermediate_size") * (2 if wide else 1))
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor, sight: Sight, inputs: PerLayerInputs | None) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), sight))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if inputs is not None:
            x = x + self.taken(x, inputs)
        return x * self.layer_scalar


def _attentions(config: Config) -> Attentions:
    layers = config.integer("num_hidden_layers")
    every_sixth = [SLIDING if (layer + 1) % 6 else FULL for layer in range(layers)]
    of_layers = config.names("layer_types", (SLIDING, FULL), layers, every_sixth)
    of_layers[-1] = FULL  # whatever the configuration says, as in transformers
    numbers = {name: [i for i in range(layers) if of_layers[i] == name] for name in sorted(set(of_layers))}
    kinds = {name: _kind(config, name, numbers[name]) for name in numbers}
    return Attentions(config, kinds, of_layers)


def _kind(config: Config, name: str, layers: list[int]) -> Kind:
    head_dim, kv_heads = _head_shape(config, name, layers)
    values_are_keys = name == FULL and config.flag("attention_k_eq_v", False)
    rope = _rope(config.part("rope_parameters").part(name), head_dim)
    window = config.integer("sliding_window") if name == SLIDING else None
    return kind_of(config, window, rope, head_dim=head_dim, kv_heads=kv_heads, values_are_keys=values_are_keys)


def _head_shape(config: Config, name: str, layers: list[int]) -> tuple[int, int]:
    """Size and number of the heads of keys in `layers`, all of one kind.

    Either full attention has keys of its own in the configuration, or `per_layer_config` says what differs from the
    rest, by the numbers of layers.
    """
    head_dim, kv_heads = config.integer("head_dim"), config.integer("num_key_value_heads")
    if not config.has("per_layer_config"):
        if name == SLIDING:
            return head_dim, kv_heads
        if config.flag("attention_k_eq_v", False):
            kv_heads = config.integer("num_global_key_value_heads", kv_heads)
        return config.integer("global_head_dim"), kv_heads
    differing = config.numbered("per_layer_config")
    of_layers = [differing.get(layer, Config({})) for layer in layers]
    for of in of_layers:
        of.only("head_dim", "num_key_value_heads")
    shapes = {(of.integer("head_dim", head_dim), of.integer("num_key_value_heads", kv_heads)) for of in of_layers}
    if len(shapes) > 1:
        raise config.error("per_layer_config", f"all layers with {name} must have heads of one size and number")
    return shapes.pop()


def _rope(config: Config, head_dim: int) -> Rope:
    if config.name("rope_type", ("default", "proportional")) == "default":
        config.expect(partial_rotary_factor=1.0)
        return Rope(config.number("rope_theta"), head_dim)
    config.expect(factor=1.0)
    return Rope(
        config.number("rope_theta"),
        head_dim,
        rotated=2 * int(config.number("partial_rotary_factor", 1.0) * head_dim // 2),
    )
