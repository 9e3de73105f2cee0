"""Gemma 3n: several residual streams, sparse feed-forward layers, a row of the table for each token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from lazyio.engine.layers.altup import AltUp, Laurel, rescaled
from lazyio.engine.layers.geglu import GeGlu
from lazyio.engine.layers.kv_sharing import Kind, Sight
from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.layers.per_layer_input import PerLayerInputs, TakesPerLayerInput
from lazyio.engine.layers.rope import Rope
from lazyio.engine.models.config import Config
from lazyio.engine.models.gemma import FULL, SLIDING, Attentions, Gemma, GemmaText, kind_of
from lazyio.engine.ubatch import Rows, Ubatch

# What a configuration leaves out: the defaults of Gemma3nTextConfig in transformers.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_SPARSE_LAYERS, _SPARSITY = 10, 0.95


class Gemma3n(Gemma):
    """The text part of Gemma 3n. Source: `Gemma3nForCausalLM` of transformers.

    The vocabulary ends with ids of images and sounds, which have no rows of their own: see `row_vocab`.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """See `Model`."""
        read = Config(_DEFAULTS | {key: value for key, value in config.items() if value is not None})
        read.expect(altup_active_idx=0)
        model = cls(read, _Text(read))
        rows = read.integer("vocab_size_per_layer_input")
        model.row_vocab = rows if rows < model.vocab else None
        return model


class _Text(GemmaText):
    def __init__(self, config: Config) -> None:
        attentions = _attentions(config)
        super().__init__(config, attentions, config.integer("hidden_size_per_layer_input"), rounds=True)
        layers = len(attentions.of_layers)
        widths, sparsities = config.integer_of_each("intermediate_size", layers), _sparsities(config, layers)
        self.layers = nn.ModuleList(_Layer(config, self, i, widths[i], sparsities[i]) for i in range(layers))
        others = range(1, config.integer("altup_num_inputs", least=2))
        self.altup_projections = nn.ModuleList(Linear(self.hidden, self.hidden) for _ in others)
        self.altup_unembed_projections = nn.ModuleList(Linear(self.hidden, self.hidden) for _ in others)

    def forward(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        x = self.embedded(ubatch.tokens)
        inputs = self.inputs(x, rows)
        streams = torch.stack([x, *(rescaled(project(x), x) for project in self.altup_projections)], 1)
        return self._joined(self.through_layers(streams, ubatch, inputs))

    def _joined(self, streams: torch.Tensor) -> torch.Tensor:
        first, *others = streams.unbind(1)
        projected = zip(self.altup_unembed_projections, others, strict=True)
        mean = torch.stack([first, *(rescaled(project(x), first) for project, x in projected)]).mean(0)
        hidden: torch.Tensor = self.norm(mean)
        return hidden


class _Layer(TakesPerLayerInput):
    """Computes the first stream and predicts the others; its input is added to these alone."""

    def __init__(self, config: Config, text: GemmaText, layer: int, width: int, sparsity: float) -> None:
        hidden, eps = text.hidden, text.eps
        super().__init__(layer, hidden, text.width, eps)
        self.self_attn = text.attentions.new(layer, hidden, eps)
        self.mlp = GeGlu(hidden, width, sparsity)
        self.altup = AltUp(config.integer("altup_num_inputs"), hidden, eps)
        self.laurel = Laurel(hidden, config.integer("laurel_rank"), eps)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self._scales = config.flag("altup_correct_scale", True)

    def forward(self, streams: torch.Tensor, sight: Sight, inputs: PerLayerInputs) -> torch.Tensor:
        predicted = self.altup.predict(streams)
        corrected = self.altup.correct(predicted, self._activated(predicted[:, 0], sight))
        first = corrected[:, 0]
        taken = self.taken(first * self.altup.correct_output_scale if self._scales else first, inputs)
        corrected[:, 1:] += taken[:, None]
        return corrected

    def _activated(self, x: torch.Tensor, sight: Sight) -> torch.Tensor:
        normed = self.input_layernorm(x)
        attended = x + self.post_attention_layernorm(self.self_attn(normed, sight))
        y = (attended + self.laurel(normed)) / math.sqrt(2)
        activated: torch.Tensor = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        return activated


def _attentions(config: Config) -> Attentions:
    layers = config.integer("num_hidden_layers")
    every_fifth = [SLIDING if (layer + 1) % 5 else FULL for layer in range(layers)]
    of_layers = config.names("layer_types", (SLIDING, FULL), layers, every_fifth)
    return Attentions(config, {name: _kind(config, name) for name in sorted(set(of_layers))}, of_layers)


def _kind(config: Config, name: str) -> Kind:
    # Older configurations have the base of either kind as a key of its own.
    theta = config.number("rope_theta" if name == FULL else "rope_local_base_freq")
    rope = config.part("rope_parameters").part(name)
    rope.expect(rope_type="default", partial_rotary_factor=1.0)
    head_dim, kv_heads = config.integer("head_dim"), config.integer("num_key_value_heads")
    window = config.integer("sliding_window") if name == SLIDING else None
    turned = Rope(rope.number("rope_theta", theta), head_dim)
    return kind_of(config, window, turned, head_dim=head_dim, kv_heads=kv_heads)


def _sparsities(config: Config, layers: int) -> list[float]:
    sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    default = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    found = config.numbers("activation_sparsity_pattern", default, count=layers)
    if not all(0.0 <= share < 1.0 for share in found):
        raise config.error("activation_sparsity_pattern", "each share of gates must be 0 or more, and below 1")
    return found
