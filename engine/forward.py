"""One forward pass over chunks of several sequences, together or each by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lazyio.engine.models.base import Model
from lazyio.engine.state import State
from lazyio.engine.ubatch import Rows, Ubatch

#: Positions that are computed apart from others where batches must change nothing. Cuts are at its multiples.
BLOCK = 256

#: The next tokens of a sequence.
Chunk = tuple[State, Sequence[int]]


class Forward:
    """The model as it computes ubatches: all tokens together, as fast as can be."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def step(self, chunks: Sequence[Chunk], rows: Rows | None) -> torch.Tensor:
        """Hidden states [tokens, hidden] of the next tokens of each sequence, none of which comes twice."""
        return self.model.step(Ubatch.of(chunks, self.model.device), rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [n, hidden]: float32 [n, vocab]."""
        with torch.inference_mode():
            return self.model.logits(hidden)


class BatchInvariant(Forward):
    """What a sequence computes does not depend on what is computed beside it, bit for bit, nor on cuts at BLOCK.

    Libraries choose other kernels for other numbers of tokens, and vectors end elsewhere. So each sequence, and each
    BLOCK of its positions, goes through the model by itself: whatever else there is, all shapes are the same. That
    gives up what batching gains.
    """

    def step(self, chunks: Sequence[Chunk], rows: Rows | None) -> torch.Tensor:
        """See `Forward`."""
        values = None if rows is None else rows.values()
        hidden, start = [], 0
        for part in (part for state, tokens in chunks for part in _parts(state, tokens)):
            stop = start + len(part[1])
            # In memory of its own, which begins where memory of any size does.
            own = None if values is None else _There(values[start:stop].clone())
            hidden.append(self.model.step(Ubatch.of([part], self.model.device), own))
            start = stop
        return torch.cat(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        with torch.inference_mode():
            return torch.cat([self.model.logits(row[None].clone()) for row in hidden])


class _There:
    """Rows that are there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def values(self) -> torch.Tensor:
        return self._values


def _parts(state: State, tokens: Sequence[int]) -> Iterator[Chunk]:
    start, before = 0, state.tokens
    while start < len(tokens):
        stop = start + BLOCK - (before + start) % BLOCK
        yield state, tokens[start:stop]
        start = stop
