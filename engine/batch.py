"""What one ubatch of the scheduler has: replies that go on by a token each, and behind them chunks of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lazyio.engine.batch_rows import Move, Part
from lazyio.engine.feed import TokenRows
from lazyio.engine.forward import Chunk
from lazyio.engine.planning import Planned
from lazyio.engine.request import Request
from lazyio.engine.state import State
from lazyio.engine.ubatch import sent


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of the tokens that were chosen last, and whose they are, in their order."""

    requests: tuple[Request, ...] = ()
    rows: TokenRows | None = None

    def part(self, stepping: tuple[Request, ...]) -> list[Part]:
        """Those of the requests that still go on, whose tokens are the first of a ubatch."""
        if self.rows is None or not stepping:
            return []
        places = {request: place for place, request in enumerate(self.requests)}
        return [Part(self.rows, tuple(Move(places[request], i, 1) for i, request in enumerate(stepping)))]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of a ubatch in their order."""

    stepping: tuple[Request, ...]
    planned: Planned

    def __len__(self) -> int:
        return len(self.stepping) + sum(len(chunk) for chunk in self.planned.chunks)

    @property
    def requests(self) -> list[Request]:
        """All that are in it, each once."""
        return [*self.stepping, *(chunk.request for chunk in self.planned.chunks)]

    @property
    def chunks(self) -> Iterator[Chunk]:
        """States and tokens, as a forward pass takes them."""
        for request in self.stepping:
            yield _state(request), request.known[-1:]
        for chunk in self.planned.chunks:
            yield _state(chunk.request), chunk.request.known[chunk.start : chunk.stop]

    def parts(self, asked: Asked) -> list[Part]:
        """Where the rows of all tokens come from."""
        return [*asked.part(self.stepping), *(part.moved(len(self.stepping)) for part in self.planned.parts)]

    def owner(self, place: int) -> Request:
        """Whose token lies there."""
        if place < len(self.stepping):
            return self.stepping[place]
        end = len(self.stepping)
        for chunk in self.planned.chunks:
            end += len(chunk)
            if place < end:
                return chunk.request
        raise AssertionError(f"token {place} of a ubatch of {len(self)}")

    def choosing(self) -> tuple[list[Request], list[int]]:
        """Which requests get their next token from this ubatch, and from the hidden state of which token each."""
        requests, places = list(self.stepping), list(range(len(self.stepping)))
        end = len(self.stepping)
        for chunk in self.planned.chunks:
            end += len(chunk)
            if chunk.is_last:
                requests.append(chunk.request)
                places.append(end - 1)
        return requests, places


def select(hidden: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The hidden states [n, hidden] of those places, in their order."""
    if len(places) == len(hidden):
        return hidden
    if len(places) == 1:
        return hidden[places[0] : places[0] + 1]
    return hidden.index_select(0, sent(torch.tensor(places), hidden.device))


def _state(request: Request) -> State:
    assert request.seat is not None
    return request.seat.state
