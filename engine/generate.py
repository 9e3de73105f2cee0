"""Replies, whole or token after token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from lazyio.engine.account import Account
from lazyio.engine.request import Request
from lazyio.engine.scheduler import Scheduler
from lazyio.engine.writing import Piece

__all__ = ["Completion", "Piece", "Reply"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply, whole or as far as it came, and what it took.

    `finish_reason` is "length" after `max_tokens`, "stop" at a stop id, which is the last of `token_ids`, or a stop
    string, "error" where something went wrong, which is `error`, and "interrupted" where it was left before its end.
    `text` is "" for a model without a tokenizer.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    account: Account
    error: Exception | None = None

    @classmethod
    def of(cls, request: Request) -> Self:
        """What there is of the reply to a request."""
        writing, error = request.writing, request.error
        reason = "error" if error is not None else writing.reason or "interrupted"
        account = request.meter.account(len(writing.tokens))
        return cls(tuple(writing.tokens), writing.text, reason, account, error)


class Reply(Iterator[Piece]):
    """Generates a reply while it is iterated over; `completion` is what there is of it, at any time.

    Made by `LLM.reply`. Replies that are open at the same time go on together, whichever is iterated over. Leaving
    early is free: `close`, the end of a with block, or forgetting it gives up what is in flight.
    """

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler, self._request = scheduler, request
        self._closed = False

    @property
    def completion(self) -> Completion:
        """What was generated so far."""
        return Completion.of(self._request)

    def __next__(self) -> Piece:
        request = self._request
        while not request.pieces or self._closed:
            if request.ended:
                self._raise_once()
                raise StopIteration
            self._scheduler.step()
        return request.pieces.popleft()

    def close(self) -> None:
        """End it here. Harmless when done twice, or after the end."""
        self._closed = True
        self._scheduler.cancel(self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_request"):  # else it was interrupted while it was made
            self.close()

    def _raise_once(self) -> None:
        if self._request.error is not None and not self._closed:
            self._closed = True
            raise self._request.error
