"""Qwen 3.5: gated delta nets, and attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn

from lazyio.engine.layers.gated_attention import GatedAttention
from lazyio.engine.layers.linear import Embedding
from lazyio.engine.layers.mlp import SiluMlp
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.models.config import Config
from lazyio.engine.models.qwen import FULL, Qwen, attention, configuration, delta_net, layer_types, rope
from lazyio.engine.ubatch import Rows, Ubatch

# What a configuration means by a key that it leaves out. Source: `Qwen3_5TextConfig` of transformers.
_DEFAULTS = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_key_value_heads": 4}


class Qwen35(Qwen):
    """The dense one. Source: `Qwen3_5ForCausalLM` of transformers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """See `Model`."""
        read = configuration(config, _DEFAULTS)
        return cls(read, Text(read, lambda: SiluMlp(read.integer("hidden_size"), read.integer("intermediate_size"))))


class Text(nn.Module):
    """Embeddings, layers, a last norm. Source: `Qwen3_5TextModel` of transformers."""

    def __init__(self, config: Config, mlp: Callable[[], nn.Module]) -> None:
        """`mlp` makes the feed-forward part of a layer. Raises ModelError for a configuration that does not fit."""
        super().__init__()
        hidden = config.integer("hidden_size")
        self.embed_tokens = Embedding(config.integer("vocab_size"), hidden)
        self.layers = nn.ModuleList(Layer(config, kind, mlp()) for kind in layer_types(config, FULL))
        self.norm = RmsNorm(hidden, config.number("rms_norm_eps"), offset=1.0)
        self._rope = rope(config)

    def forward(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        """Hidden states [tokens, hidden], normed; there are no `rows`."""
        x: torch.Tensor = self.embed_tokens(ubatch.tokens)
        angles = self._rope.angles(ubatch.positions, x.dtype)
        for layer in self.layers:
            x = layer(x, angles, ubatch)
        normed: torch.Tensor = self.norm(x)
        return normed


class Layer(nn.Module):
    """x <- x + mixer(norm(x)); x <- x + mlp(norm(x)). Source: `Qwen3_5DecoderLayer` of transformers."""

    def __init__(self, config: Config, kind: str, mlp: nn.Module) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
        self.input_layernorm = RmsNorm(hidden, eps, offset=1.0)
        self.self_attn: GatedAttention | None = None
        if kind == FULL:
            self.self_attn = attention(config)
        else:
            self.linear_attn = delta_net(config, "silu")
        self.post_attention_layernorm = RmsNorm(hidden, eps, offset=1.0)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], ubatch: Ubatch) -> torch.Tensor:
        """Of x [tokens, hidden] and the angles of the tokens' positions: [tokens, hidden]."""
        normed = self.input_layernorm(x)
        mixed = self.linear_attn(normed, ubatch) if self.self_attn is None else self.self_attn(normed, angles, ubatch)
        x = x + mixed
        fed: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed
