"""Block-sparse attention: which blocks of earlier tokens each token may attend to.

Source: `Qwen4ExpTextQSAIndexer` of transformers. A sequence is cut in blocks of `ratio` tokens. Each token has a raw
key and a query of several heads; the key of a complete block is

    bk_b = rope at the block's first token ( norm ( mean of its raw keys ) )

and the score of a block for a query is the sum over heads of relu(q_h . bk_b). Of the complete blocks up to a token,
the `budget / ratio` with the highest scores may be attended to, the first of those with equal scores, and with them the
tokens after the last complete block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lazyio.engine.layers.linear import Linear
from lazyio.engine.layers.norm import RmsNorm
from lazyio.engine.layers.rope import Rope, norm_and_rotate
from lazyio.engine.state import Composite, Growing, Recent
from lazyio.engine.ubatch import Span
from lazyio.kernels.block_selection import Selected, select_blocks, select_steps, supports
from lazyio.kernels.contract import usable
from lazyio.kernels.sparse_attention import group_of

# Scores are computed for so many queries at a time that no more of them exist at once.
_MOST_SCORES = 2**24


@dataclass
class BlockKeys(Composite):
    """The keys of a sequence's complete blocks, and the raw ones that the block after them may begin with."""

    complete: Growing  # [blocks, dim]
    raw: Recent  # [ratio - 1, dim]


class BlockSelection(nn.Module):
    """The mask of block-sparse attention, from keys and queries of its own."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        dim: int,
        budget: int,
        ratio: int,
        rope: Rope,
        eps: float,
        serves: tuple[int, int] = (0, 0),
    ) -> None:
        """`budget` is in tokens, a multiple of `ratio`; `rope` rotates no more than `dim` dimensions.

        It `serves` an attention of so many heads of queries and of keys that has a kernel for blocks; 0 is one that
        has none.
        """
        super().__init__()
        self._serves = serves
        self.heads, self.dim, self.budget, self.ratio, self.rope = heads, dim, budget, ratio, rope
        self.index_qk_proj = Linear(hidden, (heads + 1) * dim)
        self.q_layernorm = RmsNorm(dim, eps, offset=1.0)
        self.k_layernorm = RmsNorm(dim, eps, offset=1.0)

    def new_piece(self, capacity: int, dtype: torch.dtype, device: torch.device) -> BlockKeys:
        """The keys of a sequence that begins."""
        complete = Growing(capacity // self.ratio, self.dim, dtype=dtype, device=device)
        return BlockKeys(complete, Recent(self.ratio - 1, self.dim, dtype=dtype, device=device))

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], span: Span
    ) -> torch.Tensor | Selected | None:
        """Which keys the tokens of a span may see: bool [tokens, keys], or None where all up to each token.

        x [tokens, hidden] and angles [tokens, 1, rotated / 2] are those of the span. With `budget / ratio` complete
        blocks or fewer, none is left out. Where there are kernels, no mask is made, but lists of blocks.
        """
        queries, raw = self.index_qk_proj(x).split([self.heads * self.dim, self.dim], -1)
        complete = self._extended(span.state.pieces[self].raw.extend(raw), span)
        blocks = self._count(span)
        if blocks <= self.budget // self.ratio:
            return None
        queries = self._turned(queries, angles)
        if self._serves[0] and usable(x.device) and supports(self.dim, blocks):
            sizes = {"count": self.budget // self.ratio, "ratio": self.ratio}
            group = group_of(span.length, *self._serves, x.dtype, x.device)
            return select_blocks(queries, complete.lie, span.before, group=group, **sizes)
        return self._allowed(queries, complete.entries, span)

    def has_kernel(self, spans: Sequence[Span], device: torch.device) -> bool:
        """Whether `steps` can take these."""
        most = max(span.before for span in spans) // self.ratio + 1
        return self._serves[0] > 0 and usable(device) and supports(self.dim, most)

    def steps(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        spans: Sequence[Span],
        positions: torch.Tensor,
    ) -> Selected | None:
        """`forward` for spans of one token each, all with one kernel; positions int64 [spans] are those of the tokens.

        x [spans, hidden] and angles [spans, 1, rotated / 2]. None where all see all keys.
        """
        queries, raw = self.index_qk_proj(x).split([self.heads * self.dim, self.dim], -1)
        joined = Recent.extend_each([span.state.pieces[self].raw for span in spans], raw[:, None])
        complete = [self._extended(one, span) for one, span in zip(joined.unbind(), spans, strict=True)]
        count = self.budget // self.ratio
        if all(self._count(span) <= count for span in spans):
            return None
        blocks = [piece.lie for piece in complete]
        return select_steps(self._turned(queries, angles), blocks, positions, count=count, ratio=self.ratio)

    def _turned(self, queries: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return norm_and_rotate(self.q_layernorm, queries.view(-1, self.heads, self.dim), angles)

    def _count(self, span: Span) -> int:
        """How many blocks are complete with a span."""
        return (span.before + span.length) // self.ratio

    def _extended(self, raw: torch.Tensor, span: Span) -> Growing:
        """The keys [blocks, dim] of all blocks that are complete with a span.

        raw [ratio - 1 + tokens, dim] are the raw keys of its tokens, behind those before them.
        """
        piece: BlockKeys = span.state.pieces[self]
        begun = span.before % self.ratio  # raw keys of earlier spans that are in no complete block
        first, last = span.before // self.ratio, self._count(span)
        if first < last:
            members = raw[self.ratio - 1 - begun :][: (last - first) * self.ratio]
            pooled = members.view(last - first, self.ratio, self.dim).mean(1, dtype=torch.float32).to(raw.dtype)
            starts = torch.arange(first, last, device=raw.device) * self.ratio
            keys = norm_and_rotate(self.k_layernorm, pooled[:, None], self.rope.angles(starts, raw.dtype))
            piece.complete.put_each(((piece.complete,),), (keys[:, 0],), starts)
        return piece.complete

    def _allowed(self, queries: torch.Tensor, blocks: torch.Tensor, span: Span) -> torch.Tensor:
        """The mask for queries [tokens, heads, dim] that have more blocks [blocks, dim] than they may see."""
        keys = torch.arange(span.before + span.length, device=blocks.device)
        last = keys[span.before :, None]
        allowed = keys <= last
        # The block that a query's own tail lies in is not visible as a block, and its tokens stay allowed.
        visible = torch.arange(len(blocks), device=blocks.device) < (last + 1) // self.ratio
        in_blocks = allowed[:, : len(blocks) * self.ratio].view(-1, len(blocks), self.ratio)
        at_once = max(1, _MOST_SCORES // (self.heads * len(blocks)))
        for start in range(0, span.length, at_once):
            some = slice(start, start + at_once)
            found = scores(queries[some], blocks).masked_fill(~visible[some], -1)
            in_blocks[some] &= (best(found, self.budget // self.ratio) | ~visible[some])[..., None]
        return allowed


def scores(queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """sum over heads of relu(q_h . bk_b), up to a positive factor: float32 [tokens, blocks], not negative.

    queries [tokens, heads, dim], blocks [blocks, dim].
    """
    return (queries.float() @ blocks.float().T).relu_().sum(1)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Where in each row of scores [n, m] its `count` highest are, bool; of equal ones the first. 0 < count <= m."""
    # Which of several equal ones topk takes is not defined, the value of the lowest it takes is.
    lowest = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > lowest, scores == lowest
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
