"""Attention whose output is gated, with normed queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lazyio.engine.layers.attention import attend, attend_before
from lazyio.engine.layers.block_selection import BlockSelection
from lazyio.engine.layers.linear import Joined, Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.layers.rope import norm_and_rotate
from lazyio.engine.state import Composite, Growing
from lazyio.engine.ubatch import Span, Ubatch, behind, together
from lazyio.kernels.block_selection import Selected
from lazyio.kernels.contract import usable
from lazyio.kernels.sparse_attention import attend_causal, attend_selected, attend_steps, supports


@dataclass(slots=True)
class KeysValues(Composite):
    """Of all tokens of a sequence, [kv_heads, head_dim] each."""

    keys: Growing
    values: Growing

    @staticmethod
    def put_each(pieces: Sequence[KeysValues], k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Add those of the next tokens: of one sequence, or of one token of each of several."""
        kinds = [piece.keys for piece in pieces], [piece.values for piece in pieces]
        kinds[0][0].put_each(kinds, (k, v), positions)


class GatedAttention(nn.Module):
    """Grouped-query attention with a gate on what it gives.

        [q_h | gate_h] = W_q x   per head,      k, v = W_k x, W_v x
        q, k = rope(rms(q) * (1 + w)), rope(rms(k) * (1 + w))   per head
        o = softmax(q k^T / sqrt(head_dim) over the allowed keys) v
        y = W_o (o * sigmoid(gate))

    Source: `Qwen3_5Attention` and `Qwen4ExpTextAttention` of transformers.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float, selection: nn.Module | None = None
    ) -> None:
        """`selection(x, angles, span)`, of one span's part of both, gives the allowed keys, bool [tokens, keys].

        It may give None where all keys up to each token are allowed, as they are without a `selection`, and Selected
        where there is a kernel for its blocks. Its parameters are below the name "indexer".
        """
        super().__init__()
        self.q_proj = Linear(hidden, 2 * heads * head_dim)
        self.k_proj = Linear(hidden, kv_heads * head_dim)
        self.v_proj = Linear(hidden, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden)
        self._products = Joined(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm = RmsNorm(head_dim, eps, offset=1.0)
        self.k_norm = RmsNorm(head_dim, eps, offset=1.0)
        self.indexer = selection
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim

    def new_piece(self, capacity: int, dtype: torch.dtype, device: torch.device) -> KeysValues:
        """No keys and values, and room for those of `capacity` tokens."""
        shape = (capacity, self._kv_heads, self._head_dim)
        return KeysValues(Growing(*shape, dtype=dtype, device=device), Growing(*shape, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], ubatch: Ubatch) -> torch.Tensor:
        """Of x [tokens, hidden] and the angles of the tokens' positions: [tokens, hidden]."""
        with_gate, k, v = self._products(x)
        q, gate = with_gate.view(x.shape[0], -1, 2 * self._head_dim).chunk(2, -1)
        k, v = (one.view(x.shape[0], -1, self._head_dim) for one in (k, v))
        q, k = norm_and_rotate(self.q_norm, q, angles), norm_and_rotate(self.k_norm, k, angles)
        found = [
            self._attend_steps(spans, x, angles, ubatch.positions, q, k, v)
            if self._takes(spans, x.device)
            else behind([self._attend(span, x, angles, ubatch.positions, q, k, v) for span in spans])
            for spans in together(ubatch.spans)
        ]
        y: torch.Tensor = self.o_proj((behind(found) * gate.sigmoid()).flatten(1))
        return y

    def _takes(self, spans: Sequence[Span], device: torch.device) -> bool:
        """Whether there is a kernel for so many steps together."""
        if len(spans) == 1 or not self._has_kernel(device):
            return False
        if isinstance(self.indexer, BlockSelection):
            return self.indexer.has_kernel(spans, device)
        return self.indexer is None

    def _attend_steps(
        self,
        spans: Sequence[Span],
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        here = slice(spans[0].start, spans[-1].here.stop)
        pieces = [span.state.pieces[self] for span in spans]
        KeysValues.put_each(pieces, k[here], v[here], positions[here])
        keys, values = [piece.keys.lie for piece in pieces], [piece.values.lie for piece in pieces]
        selected = None
        if isinstance(self.indexer, BlockSelection):
            cos, sin = angles
            selected = self.indexer.steps(x[here], (cos[here], sin[here]), spans, positions[here])
        return attend_steps(q[here], keys, values, positions[here], selected, scale=self._head_dim**-0.5)

    def _attend(
        self,
        span: Span,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        here = span.here
        piece: KeysValues = span.state.pieces[self]
        KeysValues.put_each([piece], k[here], v[here], positions[here])
        allowed = None
        if self.indexer is not None:
            cos, sin = angles
            allowed = self.indexer(x[here], (cos[here], sin[here]), span)
        scale = self._head_dim**-0.5
        if isinstance(allowed, Selected):
            return attend_selected(q[here], piece.keys.lie, piece.values.lie, allowed, scale=scale)
        if allowed is None and self._has_kernel(x.device):
            return attend_causal(q[here], piece.keys.lie, piece.values.lie, scale=scale)
        keys, values = piece.keys.entries, piece.values.entries
        if allowed is None:
            return attend_before(q[here], keys, values, scale=scale)
        return attend(q[here], keys, values, scale=scale, allowed=allowed)

    def _has_kernel(self, device: torch.device) -> bool:
        return usable(device) and supports(self._heads, self._kv_heads, self._head_dim)
