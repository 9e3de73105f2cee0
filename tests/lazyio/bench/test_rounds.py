from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lazyio.bench.rounds import STEADY_WITHIN, Rules, Section, Turn, order
from lazyio.bench.runs import Arm, Run
from lazyio.bench.watch import Watch

MakeSection = Callable[..., Section]


@pytest.fixture
def make_section(arms: list[Arm], make_run: Callable[..., Run]) -> MakeSection:
    """Rounds of three arms, of which the last runs twice; nothing is really measured."""

    def make(yardstick: Any = None, **rules: Any) -> Section:
        asked = Rules(**({"rounds": 1} | rules))
        return Section("cold", arms, arms[-1], asked, lambda arm: make_run(arm.label), yardstick)

    return make


@pytest.fixture
def watch(console: Console) -> Watch:
    return Watch(console, 100)


def said(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def labels(turns: list[Turn]) -> str:
    return " ".join(turn.arm.label + ("'" if turn.again else "") for turn in turns)


def test_every_other_round_is_reversed(arms: list[Arm]) -> None:
    assert [labels(order(arms[:2], arms[1], number)) for number in range(4)] == ["b' a b", "b a b'"] * 2
    assert [labels(order(arms, arms[0], number)) for number in range(2)] == ["a b c a'", "a' c b a"]


@given(st.integers(1, 6), st.data())
def test_each_arm_once_and_one_twice_far_apart(count: int, data: st.DataObject) -> None:
    arms = [Arm(str(number), str(number)) for number in range(count)]
    twice = data.draw(st.sampled_from(arms))
    first, second = (order(arms, twice, number) for number in (0, 1))
    assert first == second[::-1]
    assert [turn.arm for turn in first if not turn.again] == arms
    again = [turn.again for turn in first].index(True)
    assert first[again].arm == twice
    assert abs(again - first.index(Turn(twice))) >= count / 2


def test_a_yardstick_stands_before_between_and_after(make_section: MakeSection, watch: Watch, scripted: Any) -> None:
    yardstick = scripted(*(100.0 + number for number in range(5)))
    section = make_section(yardstick)
    section.execute(watch)
    assert [run.arm for run in section.runs] == ["c", "a", "b", "c"]
    assert yardstick.compared == [(100.0, 101.0), (101.0, 102.0), (102.0, 103.0), (103.0, 104.0)]
    assert all(run.counted for run in section.runs)
    assert section.repeats == []


def test_without_a_yardstick_rounds_stand(make_section: MakeSection, watch: Watch) -> None:
    section = make_section(rounds=3)
    section.execute(watch)
    assert [run.round for run in section.runs] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(run.counted for run in section.runs)


def test_an_unsteady_round_is_broken_off_and_run_again(
    make_section: MakeSection, watch: Watch, console: Console, scripted: Any
) -> None:
    section = make_section(scripted(100.0, 100.0, 100.0 / STEADY_WITHIN - 1, 100.0))
    section.execute(watch)
    assert [(run.arm, run.counted) for run in section.runs] == [
        ("c", False),
        ("a", False),
        ("c", True),
        ("a", True),
        ("b", True),
        ("c", True),
    ]
    (repeat,) = section.repeats
    assert repeat.round == 0
    assert repeat.reason == "unsteady: device limit 76 and 100 reads/s next to one run"
    assert "round 1 is run again: unsteady" in said(console)
    assert section.summary().counted_rounds == 1


def test_what_is_steady_enough_is_not_repeated(make_section: MakeSection, watch: Watch, scripted: Any) -> None:
    section = make_section(scripted(100.0, 100.0 / STEADY_WITHIN + 0.01, 100.0))
    section.execute(watch)
    assert section.repeats == []


def test_repeats_are_bounded_over_all_rounds_together(make_section: MakeSection, watch: Watch, scripted: Any) -> None:
    section = make_section(scripted(*[100.0, 10.0] * 50), rounds=2, max_repeats=3)
    section.execute(watch)
    assert [repeat.round for repeat in section.repeats] == [0, 0, 0]
    assert not any(run.counted for run in section.runs)
    assert [run.round for run in section.runs].count(1) == 4  # run to the end, though it does not count
    summary = section.summary()
    assert (summary.rounds, summary.counted_rounds) == (2, 0)


def test_a_slow_device_is_waited_for(
    make_section: MakeSection, watch: Watch, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    section = make_section(scripted(39.0, 40.0, 41.0, 41.0), min_iops=40.0, pause_s=7.0, rounds=2)
    section.execute(watch)
    assert [repeat.reason for repeat in section.repeats] == ["slow: device limit 39 reads/s, at least 40 are asked"]
    assert pauses == []  # fast enough again
    section = make_section(scripted(40.0, 39.0, 41.0), min_iops=40.0, pause_s=7.0, rounds=2)
    section.execute(watch)
    assert len(section.repeats) == 1
    assert pauses == [7.0]
    assert [run.counted for run in section.runs] == [False] + [True] * 8
