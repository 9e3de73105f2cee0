from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lazyio.bench.turns import in_turn


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 9))
def test_turns_of_a_round(count: int, place: int, number: int) -> None:
    arms = list(range(count))
    twice = place % count
    turns = in_turn(arms, twice, number)
    assert turns == in_turn(arms, twice, number + 1)[::-1]
    assert sorted(turns) == sorted([*((arm, False) for arm in arms), (twice, True)])
    assert abs(turns.index((twice, True)) - turns.index((twice, False))) >= count / 2


def test_two_arms() -> None:
    rounds = ["".join(arm.upper() if again else arm for arm, again in in_turn("ab", "a", number)) for number in (0, 1)]
    assert rounds == ["abA", "Aba"]
