"""The tokens of a prompt and its reply on their way through a model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from lazyio.engine.feed import Feed, TokenRows
from lazyio.engine.models.base import Model
from lazyio.engine.ubatch import Ubatch


@dataclass(frozen=True, slots=True)
class _Wait:
    """How long the host waited for rows; on a device two events, between which that stood still, tell it better."""

    host_s: float = 0.0
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def seconds(self) -> float:
        if self.events is None:
            return self.host_s
        first, second = self.events
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


class TokenSequence:
    """One sequence: its state, and its rows asked for as early as its tokens are known.

    `feed` is None for a model without a table.
    """

    def __init__(self, model: Model, feed: Feed | None, capacity: int) -> None:
        self._model, self._feed = model, feed
        self._state = model.new_state(capacity)
        self._tokens: list[int] = []
        self._asked: TokenRows | None = None
        self._waits: list[_Wait] = []

    @property
    def waited_s(self) -> list[float]:
        """How long computing stood still for rows, in each ubatch and each step so far."""
        return [wait.seconds() for wait in self._waits]

    def prefill(self, tokens: Sequence[int], cuts: Sequence[int]) -> Generator[torch.Tensor, None, None]:
        """Compute the next tokens in ubatches of the sizes `cuts`: hidden states [tokens, hidden] of each.

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
        with closing(self._feed.prompt(arrays, self._before())) as all_rows:
            for chunk, rows in zip(chunks, all_rows, strict=True):
                yield self._compute(chunk, rows)

    def ask(self, token: int) -> None:
        """Have the rows of the next token read, without waiting."""
        if self._feed is not None:
            self._asked = self._feed.step([([token], self._before())])

    def step(self, token: int) -> torch.Tensor:
        """Compute the token that was asked for: hidden states [1, hidden]."""
        rows, self._asked = self._asked, None
        return self._compute([token], rows)

    def prompt_logits(self, tokens: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
        """`prefill`, to its end: logits of the last token, float32 [vocab]."""
        with closing(self.prefill(tokens, cuts)) as ubatches:
            for hidden in ubatches:
                last = hidden[-1:]
        return self._logits(last)

    def step_logits(self, token: int) -> torch.Tensor:
        """`step`, and the logits float32 [vocab]."""
        return self._logits(self.step(token))

    def close(self) -> None:
        """Give up rows that were asked for and not used."""
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None

    def _compute(self, tokens: Sequence[int], rows: TokenRows | None) -> torch.Tensor:
        ubatch = Ubatch.of([(self._state, tokens)], self._model.device)
        hidden = self._model.step(ubatch, rows)
        self._tokens += tokens
        self._waits.append(_Wait() if rows is None else _Wait(rows.exposed_s, rows.stall_events))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self._model.logits(hidden)[0]

    def _before(self) -> list[int]:
        assert self._feed is not None
        context = self._feed.row_ids.context
        return self._tokens[-context:] if context else []
