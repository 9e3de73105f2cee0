"""The order of arms within a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(arms: Sequence[T], twice: T, number: int) -> list[tuple[T, bool]]:
    """The turns of round `number`, counted from 0: all arms, reversed in every other round.

    `twice` has a second run, of which the second of the pair tells. It stands at the end of the round that is farther
    from the first, so that the noise it shows has the drift of a whole round in it.
    """
    turns, again = [(arm, False) for arm in arms], (twice, True)
    turns = [again, *turns] if arms.index(twice) >= len(arms) / 2 else [*turns, again]
    return turns[::-1] if number % 2 else turns
