"""What one forward pass handles: tokens of one or more sequences, one after the other in one dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from lazyio.engine.state import State


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, start + length) of a ubatch: they follow on the `before` tokens of their sequence."""

    state: State
    start: int
    length: int
    before: int

    @property
    def here(self) -> slice:
        """Where they lie in the ubatch."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True, slots=True)
class Ubatch:
    """Chunks of prompts and decode steps that are computed together; linear layers see them as one batch of tokens."""

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens], each in its own sequence
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, chunks: Sequence[tuple[State, Sequence[int]]], device: torch.device) -> Ubatch:
        """The next tokens of each sequence. No sequence may come twice, and none may be empty."""
        spans: list[Span] = []
        start = 0
        for state, tokens in chunks:
            spans.append(Span(state, start, len(tokens), state.tokens))
            start += len(tokens)
        positions = torch.cat([torch.arange(span.before, span.before + span.length) for span in spans])
        ids = torch.tensor([token for _, tokens in chunks for token in tokens], dtype=torch.int64)
        return cls(sent(ids, device), sent(positions, device), tuple(spans))

    def __len__(self) -> int:
        return len(self.tokens)


def together(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans that a layer may take together: those of one token in a row, each of the others by itself."""
    for alone, some in groupby(spans, lambda span: span.length == 1):
        row = list(some)
        yield from [row] if alone else ([span] for span in row)


def behind(parts: list[torch.Tensor]) -> torch.Tensor:
    """Parts of a ubatch one behind the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Rows(Protocol):
    """The table's rows for the tokens of a ubatch, which may still be on their way."""

    def values(self) -> torch.Tensor:
        """Wait for them: [tokens, rows a token * row values], in the model's dtype and on its device.

        A model asks as late as it can, once, so that what it computes before hides the wait.
        """
        ...


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, without waiting for it."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
