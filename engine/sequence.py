"""The tokens of one prompt on their way through a model, by themselves."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import accumulate, pairwise

import numpy as np
import torch

from lazyio.engine.feed import Feed, TokenRows
from lazyio.engine.forward import Forward
from lazyio.engine.state import State


class TokenSequence:
    """One sequence that begins: its state, and its rows asked for early. `feed` is None for a model without a table."""

    def __init__(self, forward: Forward, feed: Feed | None, state: State) -> None:
        self._forward, self._feed, self._state = forward, feed, state

    def prefill(self, tokens: Sequence[int], cuts: Sequence[int]) -> Generator[torch.Tensor, None, None]:
        """Compute the first tokens in ubatches of the sizes `cuts`: hidden states [tokens, hidden] of each.

        The rows of all of them are asked for at once. Closing the iterator gives up what is in flight.
        """
        ends = [0, *accumulate(cuts)]
        assert ends[-1] == len(tokens), f"cuts of {ends[-1]} tokens for {len(tokens)}"
        chunks = [tokens[start:end] for start, end in pairwise(ends)]
        if self._feed is None:
            for chunk in chunks:
                yield self._compute(chunk, None)
            return
        arrays = [np.array(chunk, np.int64) for chunk in chunks]
        with closing(self._feed.prompt(arrays)) as all_rows:
            for chunk, rows in zip(chunks, all_rows, strict=True):
                yield self._compute(chunk, rows)

    def _compute(self, tokens: Sequence[int], rows: TokenRows | None) -> torch.Tensor:
        return self._forward.step([(self._state, tokens)], rows)
