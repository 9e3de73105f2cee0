"""What the parts of a comparison have in common: rounds of runs, of which the last may be under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Rounds(Generic[T]):
    """Complete rounds, and the runs so far of the one that is under way, or was broken off."""

    rounds: list[list[T]] = field(default_factory=list)
    unfinished: list[T] = field(default_factory=list)

    def add(self, run: T, turns: int) -> None:
        """One more run, in a round of so many."""
        self.unfinished.append(run)
        if len(self.unfinished) == turns:
            self.rounds.append(self.unfinished)
            self.unfinished = []

    def runs(self) -> Iterator[T]:
        """All of them, in the order in which they were made."""
        for turns in (*self.rounds, self.unfinished):
            yield from turns
