"""What the generations of Gemma have in common: kinds of attention, embeddings, per-layer inputs, the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lazyio.engine.layers.kv_sharing import Kind, OwnAttention, SharedAttention, Sight
from lazyio.engine.layers.linear import Embedding, Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.layers.per_layer_input import PerLayerInputs
from lazyio.engine.layers.rope import Rope
from lazyio.engine.layers.rounding import rounded
from lazyio.engine.models.base import Model
from lazyio.engine.models.config import Config
from lazyio.engine.ubatch import Rows, Ubatch

SLIDING, FULL = "sliding_attention", "full_attention"


class Attentions:
    """Which kind of attention each layer has, and which layers have keys of their own."""

    def __init__(self, config: Config, kinds: Mapping[str, Kind], of_layers: Sequence[str]) -> None:
        """Raises ModelError if layers without keys are of a kind that none with keys is of."""
        config.expect(attention_bias=False, hidden_activation="gelu_pytorch_tanh", rope_scaling=None)
        self.kinds, self.of_layers = kinds, of_layers
        self.with_keys = len(of_layers) - config.integer("num_kv_shared_layers", least=0)
        if not set(of_layers[max(0, self.with_keys) :]) <= set(of_layers[: max(0, self.with_keys)]):
            must = f"of {len(of_layers)} layers, those that share keys must follow on one of their type that has them"
            raise config.error("num_kv_shared_layers", must)

    def new(self, layer: int, hidden: int, eps: float) -> SharedAttention:
        """The attention of that layer."""
        kind = self.kinds[self.of_layers[layer]]
        return (OwnAttention if layer < self.with_keys else SharedAttention)(kind, hidden, eps)

    def sights(self, ubatch: Ubatch, dtype: torch.dtype) -> list[Sight]:
        """What each layer sees of a ubatch."""
        of_kinds = {name: Sight(kind, ubatch, dtype) for name, kind in self.kinds.items()}
        return [of_kinds[name] for name in self.of_layers]


def kind_of(
    config: Config, window: int | None, rope: Rope, *, head_dim: int, kv_heads: int, values_are_keys: bool = False
) -> Kind:
    """A kind of attention. Raises ModelError if its heads do not go together."""
    heads = config.integer("num_attention_heads")
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"it must be a multiple of the {kv_heads} heads of keys")
    if head_dim % 2:
        raise config.error("head_dim", f"heads of {head_dim} values can't be rotated in pairs")
    return Kind(window, heads, kv_heads, head_dim, rope, values_are_keys)


class GemmaText(nn.Module):
    """Everything but the head: what transformers calls `model`. Who extends it gives it its layers.

    Source: `Gemma4TextModel` and `Gemma3nTextModel` of transformers.
    """

    layers: nn.ModuleList

    def __init__(self, config: Config, attentions: Attentions, width: int, *, rounds: bool) -> None:
        """`width` is that of a layer's input, 0 without a table; `rounds`, if factors of inputs have the model's dtype.

        Raises ModelError for a configuration that does not fit.
        """
        super().__init__()
        self.attentions, self.width, self._rounds = attentions, width, rounds
        self.hidden, self.eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
        self.embed_tokens = Embedding(config.integer("vocab_size"), self.hidden)
        self.norm = RmsNorm(self.hidden, self.eps)
        if width:
            self.per_layer_model_projection = Linear(self.hidden, len(attentions.of_layers) * width)
            self.per_layer_projection_norm = RmsNorm(width, self.eps)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of int64 [tokens]: [tokens, hidden]."""
        x: torch.Tensor = self.embed_tokens(tokens)
        return x * rounded(self.hidden**0.5, x.dtype)

    def inputs(self, x: torch.Tensor, rows: Rows | None) -> PerLayerInputs | None:
        """The per-layer inputs of embeddings [tokens, hidden] and their rows, None without a table."""
        if not self.width:
            return None
        assert rows is not None, "a model with a table was given no rows"
        context = self.per_layer_model_projection(x) * self._factor(self.hidden**-0.5, x.dtype)
        context = self.per_layer_projection_norm(context.view(len(x), -1, self.width))
        scale = rounded(self.width**0.5, x.dtype)
        return PerLayerInputs(context, rows, scale=scale, mean_scale=self._factor(0.5**0.5, x.dtype))

    def through_layers(self, x: torch.Tensor, ubatch: Ubatch, inputs: PerLayerInputs | None) -> torch.Tensor:
        """Of what enters the first layer, [tokens, ...]: what leaves the last one."""
        for layer, sight in zip(self.layers, self.attentions.sights(ubatch, x.dtype), strict=True):
            x = layer(x, sight, inputs)
        return x

    def _factor(self, factor: float, dtype: torch.dtype) -> float:
        return rounded(factor, dtype) if self._rounds else factor


class Gemma(Model):
    """A text model of the family: logits = cap * tanh(x W^T / cap), where W is the embedding unless they are apart."""

    def __init__(self, config: Config, text: GemmaText) -> None:
        super().__init__()
        self.model = text
        self.vocab, self.max_tokens = config.integer("vocab_size"), config.integer("max_position_embeddings")
        self.row_values = len(text.layers) * text.width
        self.table = "model.embed_tokens_per_layer.weight" if text.width else None
        self.lm_head = Linear(text.hidden, self.vocab)
        tied = config.flag("tie_word_embeddings", True)
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        self._cap = config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None

    def forward(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        """See `Model`."""
        hidden: torch.Tensor = self.model(ubatch, rows)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        logits = self.lm_head(hidden).float()
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
