"""Qwen4-Exp: gated delta nets and block-sparse attention between hyper-connections, experts, a table of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from lazyio.engine.layers.block_selection import BlockSelection
from lazyio.engine.layers.gated_attention import GatedAttention
from lazyio.engine.layers.hyper_connection import HyperConnection, StreamMixer, Streams
from lazyio.engine.layers.linear import Embedding
from lazyio.engine.layers.ngram_embedding import NgramEmbedding
from lazyio.engine.layers.rope import Rope
from lazyio.engine.models.config import Config
from lazyio.engine.models.qwen import (
    FULL,
    LINEAR,
    Qwen,
    attention,
    configuration,
    delta_net,
    experts,
    layer_types,
    rope,
)
from lazyio.engine.ubatch import Rows, Ubatch
from lazyio.kernels.sparse_attention import supports

# What a configuration means by a key that it leaves out. Source: `Qwen4ExpTextConfig` of transformers.
# What versions of transformers call full layers, which select blocks of keys, in files that they write.
_SELECTING = ("indexed_attention", "qwen_sparse_attention")

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "output_gate_type": "silu",
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [],
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
}


class Qwen4Exp(Qwen):
    """The text part, its one table at any layer. Source: `Qwen4ExpForCausalLM` of transformers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """See `Model`."""
        return cls(configuration(config, _DEFAULTS))

    def __init__(self, config: Config) -> None:
        super().__init__(config, Text(config))
        layer = _table_layer(config)
        if layer is not None:
            self.table = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.weight"
            self.row_values = _row_values(config)


class Text(nn.Module):
    """Embeddings in all streams, layers, what comes out of the streams. Source: `Qwen4ExpTextModel` of transformers."""

    def __init__(self, config: Config) -> None:
        """Raises ModelError for a configuration that does not fit."""
        super().__init__()
        self._streams, self._rope = config.integer("hc_count", least=2), rope(config)
        self.embed_tokens = Embedding(config.integer("vocab_size"), config.integer("hidden_size"))
        kinds = enumerate(layer_types(config, FULL, *_SELECTING))
        self.layers = nn.ModuleList(Layer(config, layer, kind, self._rope) for layer, kind in kinds)
        self.hyper_connection_mixer = StreamMixer(*_of_streams(config))

    def forward(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        """Hidden states [tokens, hidden]."""
        embedded = self.embed_tokens(ubatch.tokens)
        streams = Streams(embedded.repeat(1, self._streams), self._streams)
        angles = self._rope.angles(ubatch.positions, embedded.dtype)
        for layer in self.layers:
            streams = layer(streams, angles, ubatch, rows)
        hidden: torch.Tensor = self.hyper_connection_mixer(streams)
        return hidden


class Layer(nn.Module):
    """The rows of the table, in the layer that has them, a mixer, experts: each is added to the streams.

    Source: `Qwen4ExpTextDecoderLayer` of transformers.
    """

    def __init__(self, config: Config, layer: int, kind: str, of_heads: Rope) -> None:
        super().__init__()
        self.ple = _ngram_embedding(config) if layer == _table_layer(config) else None
        self.attn_hyper_connection = HyperConnection(*_of_streams(config))
        self.self_attn: GatedAttention | None = None
        if kind == LINEAR:
            self.linear_attn = delta_net(config, config.name("output_gate_type", ("sigmoid", "silu")))
        else:
            self.self_attn = attention(config, _selection(config, of_heads))
        self.mlp_hyper_connection = HyperConnection(*_of_streams(config))
        self.mlp = experts(config)

    def forward(
        self,
        streams: Streams,
        angles: tuple[torch.Tensor, torch.Tensor],
        ubatch: Ubatch,
        rows: Rows | None,
    ) -> Streams:
        """Of streams and the angles of the tokens' positions: the streams after it."""

        def mixer(x: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = (
                self.linear_attn(x, ubatch) if self.self_attn is None else self.self_attn(x, angles, ubatch)
            )
            return mixed

        if self.ple is not None:
            assert rows is not None, "a model with a table was given no rows"
            now = streams.now()
            streams = Streams(now + self.ple(now, ubatch, rows), streams.count)
        streams = self.attn_hyper_connection(streams, mixer)
        after: Streams = self.mlp_hyper_connection(streams, self.mlp)
        return after


def _table_layer(config: Config) -> int | None:
    """The layer that takes rows of the table. The configuration counts layers from 1."""
    layers = config.integer("num_hidden_layers")
    numbers = set(config.integers("ple_layer_ids"))
    if len(numbers) > 1 or not numbers <= set(range(1, layers + 1)):
        raise config.error("ple_layer_ids", f"it must name one layer, from 1 to {layers}, or none")
    return numbers.pop() - 1 if numbers else None


def _row_values(config: Config) -> int:
    return config.integer("ple_embed_dim", config.integer("hidden_size"))


def _of_streams(config: Config) -> tuple[int, int, int, float]:
    """Hidden size, streams, rank and eps of a hyper-connection."""
    hidden, streams = config.integer("hidden_size"), config.integer("hc_count", least=2)
    return hidden, streams, config.integer("hc_lowrank"), config.number("rms_norm_eps")


def _ngram_embedding(config: Config) -> NgramEmbedding:
    hidden, streams, _, eps = _of_streams(config)
    kernel, dilation = config.integer("ple_conv_kernel_size"), config.integer("ngram_size", least=2)
    return NgramEmbedding(hidden, streams, _row_values(config), kernel, dilation, eps)


def _selection(config: Config, of_heads: Rope) -> BlockSelection:
    """Which keys an attention layer sees; its own keys and queries are rotated like those of the heads."""
    config.expect(indexer_kv_heads=1)
    heads, dim = config.integer("indexer_n_heads"), config.integer("indexer_head_dim")
    budget, ratio = config.integer("indexer_budget"), config.integer("indexer_compress_ratio")
    if dim < of_heads.dims:
        raise config.error("indexer_head_dim", f"it must be {of_heads.dims} or more, as many as are rotated of a head")
    if budget % ratio:
        raise config.error("indexer_budget", f"it must be a multiple of indexer_compress_ratio, {ratio}")
    q_heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    serves = (q_heads, kv_heads) if supports(q_heads, kv_heads, config.integer("head_dim"), ratio) else (0, 0)
    hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    return BlockSelection(hidden, heads, dim, budget, ratio, of_heads, eps, serves)
