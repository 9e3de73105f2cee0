"""Replies: token after token, with the rows of each asked for as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from lazyio.engine.account import Account, Meter
from lazyio.engine.sampling import Sampler
from lazyio.engine.sequence import TokenSequence
from lazyio.engine.stopping import StopStrings
from lazyio.errors import ModelError

if TYPE_CHECKING:
    from lazyio.engine.text.text import Text

_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply, whole or as far as it came, and what it took.

    `finish_reason` is "length" after `max_tokens`, "stop" at a stop id, which is the last of `token_ids`, or a stop
    string, and "interrupted" where it was left before its end. `text` is "" for a model without a tokenizer.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    account: Account


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be generated: all of it checked, nothing of it begun."""

    tokens: Sequence[int]  # of the prompt
    cuts: Sequence[int]  # of the prompt into ubatches
    max_tokens: int
    stop_ids: Collection[int]
    stop_strings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next token of a reply, and the text that became certain with it, which may be none or that of several."""

    token: int
    text: str


class Reply(Iterator[Piece]):
    """Generates a reply while it is iterated over; `completion` is what there is of it, at any time.

    Made by `LLM.reply`. Leaving early is free: `close`, or the end of a with block, gives up what is in flight.
    """

    def __init__(self, sequence: TokenSequence, plan: Plan, sampler: Sampler, text: Text | None, meter: Meter) -> None:
        self._sequence, self._plan, self._sampler, self._meter = sequence, plan, sampler, meter
        self._stream = None if text is None else text.stream()
        self._stop = StopStrings(plan.stop_strings)
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._finish_reason = _INTERRUPTED
        self._pieces = self._run()

    @property
    def completion(self) -> Completion:
        """What was generated so far."""
        account = self._meter.account(len(self._tokens), self._sequence.waited_s)
        return Completion(tuple(self._tokens), "".join(self._text), self._finish_reason, account)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it here. Harmless when done twice, or after the end."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Generator[Piece, None, None]:
        with closing(self._sequence):
            self._meter.begin()
            token = self._choose(self._sequence.prompt_logits(self._plan.tokens, self._plan.cuts))
            self._meter.prompt_done()
            while True:
                began = time.perf_counter()
                self._tokens.append(token)
                reason = self._reason_to_end()
                if reason is None:
                    # Before anything else: reads go on while text is made of the token, and shown.
                    self._sequence.ask(token)
                piece = Piece(token, self._text_of(token, reason))
                own_s = time.perf_counter() - began
                yield piece
                if self._finish_reason != _INTERRUPTED:
                    return
                began = time.perf_counter() - own_s
                token = self._choose(self._sequence.step_logits(token))
                self._meter.step_done(time.perf_counter() - began)

    def _choose(self, logits: torch.Tensor) -> int:
        chosen = self._sampler.choose(logits)
        began = time.perf_counter()
        token = int(chosen)  # the one time in a step that the host waits for the device
        self._meter.device_awaited(time.perf_counter() - began)
        if token < 0:
            known = len(self._plan.tokens) + len(self._tokens)
            raise ModelError(
                f"the logits after {known} tokens are no finite numbers: the weights are damaged, or values outgrow "
                "the dtype; load the model with dtype float32, or copy it again"
            )
        return token

    def _reason_to_end(self) -> str | None:
        """Why the last token ends the reply, whatever its text."""
        if self._tokens[-1] in self._plan.stop_ids:
            return "stop"
        return "length" if len(self._tokens) == self._plan.max_tokens else None

    def _text_of(self, token: int, reason: str | None) -> str:
        """The text that is certain with this token, all that is left where it is the last; sets the finish reason."""
        stopped = reason == "stop"
        text = "" if stopped or self._stream is None else self._stop.add(self._stream.add(token))
        if reason is not None and not self._stop.found:
            text += self._rest()
        self._finish_reason = "stop" if self._stop.found else reason or _INTERRUPTED
        self._text.append(text)
        return text

    def _rest(self) -> str:
        if self._stream is None:
            return ""
        text = self._stop.add(self._stream.end())
        return text if self._stop.found else text + self._stop.end()
