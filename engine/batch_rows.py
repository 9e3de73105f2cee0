"""The rows of a ubatch of several sequences, put together from what was asked for at different times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lazyio.engine.feed import Feed, TokenRows
from lazyio.engine.waits import Wait


@dataclass(frozen=True, slots=True)
class Move:
    """Of the tokens that were asked for together, `length` from `source` on lie at `target` of the ubatch."""

    source: int
    target: int
    length: int

    def moved(self, by: int) -> Move:
        """The same so many tokens further in the ubatch."""
        return Move(self.source, self.target + by, self.length)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that were asked for together, and where in a ubatch those belong that it has use for."""

    rows: TokenRows
    moves: tuple[Move, ...]

    def moved(self, by: int) -> Part:
        """The same so many tokens further in the ubatch."""
        return Part(self.rows, tuple(move.moved(by) for move in self.moves))


class BatchRows:
    """The rows of a ubatch as models take them (`lazyio.engine.ubatch.Rows`), from parts that fill all of it.

    Rows that can't be read don't fail the ubatch, in which other sequences are: theirs are zeros, and `failed` has the
    error by the first token that they were for. `then` is called when the values have been taken.
    """

    def __init__(self, feed: Feed, parts: Sequence[Part], tokens: int, then: Callable[[], None]) -> None:
        self._feed, self._parts, self._tokens, self._then = feed, parts, tokens, then
        self._read_again: list[TokenRows] = []
        self.failed: dict[int, Exception] = {}

    def values(self) -> torch.Tensor:
        """Wait for them: [tokens, rows a token * row values]. Called once."""
        out = self._feed.empty(self._tokens)
        for part in self._parts:
            try:
                _fill(part, out)
            except Exception as error:  # whatever it is, it is for whose rows they are
                self._fill_apart(part, out, error)
        self._then()
        return out

    @property
    def wait(self) -> Wait:
        """How long computing stood still for them."""
        rows = [*(part.rows for part in self._parts), *self._read_again]
        stalls = tuple(each.stall_events for each in rows if each.stall_events is not None)
        return Wait(sum(each.exposed_s for each in rows), stalls)

    def _fill_apart(self, part: Part, out: torch.Tensor, error: Exception) -> None:
        """What failed together is read again one sequence at a time, so that it fails only where it must."""
        for move in part.moves:
            here = out[move.target : move.target + move.length]
            try:
                if len(part.moves) == 1:
                    raise error
                again = self._feed.again(part.rows, slice(move.source, move.source + move.length))
                self._read_again.append(again)
                again.values(here)
            except Exception as own:
                here.zero_()
                self.failed[move.target] = own


def _fill(part: Part, out: torch.Tensor) -> None:
    first = part.moves[0]
    shift = first.target - first.source
    if sum(move.length for move in part.moves) == len(part.rows) and all(
        move.target - move.source == shift for move in part.moves
    ):
        part.rows.values(out[first.target : first.target + len(part.rows)])
        return
    values = part.rows.values()
    for move in part.moves:
        out[move.target : move.target + move.length] = values[move.source : move.source + move.length]
