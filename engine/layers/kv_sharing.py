"""Attention of Gemma, in which the last layers have no keys of their own and see those of a layer before them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm, rms
from lazyio.engine.layers.rope import Rope, norm_and_rotate
from lazyio.engine.layers.sliding_attention import Block, attend_blocks, blocks
from lazyio.engine.state import Composite, Growing, Sliding
from lazyio.engine.ubatch import Span, Ubatch, behind


@dataclass(frozen=True, slots=True)
class Kind:
    """What layers with the same reach have in common: all keys before a token, or a window of them."""

    window: int | None
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    #: Values are the keys before their norm and rotation.
    values_are_keys: bool = False


class Sight:
    """What all layers of a kind see of a ubatch, made once for them.

    `seen` are the keys and values of each span, [keys, kv_heads, head_dim], that a layer with its own keys has left
    for itself and for the layers behind it that have none.
    """

    def __init__(self, kind: Kind, ubatch: Ubatch, dtype: torch.dtype) -> None:
        device = ubatch.tokens.device
        self.spans = ubatch.spans
        self.angles = kind.rope.angles(ubatch.positions, dtype)
        self.blocks = [blocks(span.length, _keys(span, kind.window), device, kind.window) for span in ubatch.spans]
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []


def _keys(span: Span, window: int | None) -> int:
    return span.length + (span.before if window is None else min(span.before, window - 1))


@dataclass(frozen=True, slots=True)
class KeysAndValues(Composite):
    """Those of a sequence in one layer."""

    k: Growing | Sliding
    v: Growing | Sliding


class SharedAttention(nn.Module):
    """y = W_o softmax(q k^T) v with q = rope(norm(W_q x)) and the keys and values last left in sight.

    Source: `Gemma4TextAttention` and `Gemma3nTextAttention` of transformers.
    """

    def __init__(self, kind: Kind, hidden: int, eps: float) -> None:
        super().__init__()
        self.kind = kind
        self.q_proj = Linear(hidden, kind.heads * kind.head_dim)
        self.q_norm = RmsNorm(kind.head_dim, eps)
        self.o_proj = Linear(kind.heads * kind.head_dim, hidden)

    def forward(self, x: torch.Tensor, sight: Sight) -> torch.Tensor:
        """Of x [tokens, hidden]: [tokens, hidden]."""
        q = norm_and_rotate(self.q_norm, self._heads(self.q_proj(x)), sight.angles)
        of_spans = zip(sight.spans, sight.seen, sight.blocks, strict=True)
        out = [self._attended(q[span.here], seen, parts) for span, seen, parts in of_spans]
        y: torch.Tensor = self.o_proj(behind(out))
        return y

    def _attended(self, q: torch.Tensor, seen: tuple[torch.Tensor, torch.Tensor], parts: list[Block]) -> torch.Tensor:
        return attend_blocks(q, *seen, parts, scale=1.0).flatten(1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self.kind.head_dim)


class OwnAttention(SharedAttention):
    """The same with keys and values of its own: k = rope(norm(W_k x)), v = rms(W_v x), kept for the tokens to come."""

    def __init__(self, kind: Kind, hidden: int, eps: float) -> None:
        super().__init__(kind, hidden, eps)
        self.k_proj = Linear(hidden, kind.kv_heads * kind.head_dim)
        self.k_norm = RmsNorm(kind.head_dim, eps)
        self.v_proj = None if kind.values_are_keys else Linear(hidden, kind.kv_heads * kind.head_dim)

    def new_piece(self, capacity: int, dtype: torch.dtype, device: torch.device) -> KeysAndValues:
        """Of a sequence that begins: all its keys and values, or those of the last window."""
        shape = (self.kind.kv_heads, self.kind.head_dim)

        def new() -> Growing | Sliding:
            if self.kind.window is None:
                return Growing(capacity, *shape, dtype=dtype, device=device)
            return Sliding(self.kind.window, capacity, *shape, dtype=dtype, device=device)

        return KeysAndValues(new(), new())

    def forward(self, x: torch.Tensor, sight: Sight) -> torch.Tensor:
        """Of x [tokens, hidden]: [tokens, hidden]. Its keys and values are in sight from now on."""
        keys = self._heads(self.k_proj(x))
        values = keys if self.v_proj is None else self._heads(self.v_proj(x))
        k = norm_and_rotate(self.k_norm, keys, sight.angles)
        v = rms(values, self.k_norm.eps).to(x.dtype)
        sight.seen = [self._appended(span, k[span.here], v[span.here]) for span in sight.spans]
        return super().forward(x, sight)

    def _appended(self, span: Span, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        piece: KeysAndValues = span.state.pieces[self]
        return piece.k.append(k), piece.v.append(v)
