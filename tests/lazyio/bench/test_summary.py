from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.bench.runs import Run
from lazyio.bench.summary import Paired, Spread, summarise

MakeRun = Callable[..., Run]


def test_spread_is_of_those_values_that_there_are() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([None, None]) is None


def test_paired_ratios() -> None:
    found = Paired.of([0.9, 1.1, 1.3, 0.7])
    assert found is not None
    assert (found.median, found.low, found.high, found.mean) == (1.0, 0.7, 1.3, 1.0)
    assert (found.slower, found.rounds) == (2, 4)
    # deviations -.1 .1 .3 -.3: variance .2 / 3, standard error of 4 of them half its root
    assert found.two_se == pytest.approx((0.2 / 3) ** 0.5)


def test_one_pair_has_no_error_and_none_is_none() -> None:
    found = Paired.of([2.0])
    assert found is not None
    assert found.two_se is None
    assert Paired.of([]) is None


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=30))
def test_paired_lies_in_its_range(ratios: list[float]) -> None:
    found = Paired.of(ratios)
    assert found is not None
    assert found.low <= found.median <= found.high
    assert found.slower == len([ratio for ratio in ratios if ratio < 1])
    assert found.two_se == pytest.approx(2 * statistics.stdev(ratios) / len(ratios) ** 0.5)


def rounds_of(make_run: MakeRun, *rates: tuple[float, float, float], counted: bool = True) -> list[Run]:
    """Rounds of two arms: rows/s of `on`, of `uring`, and of `uring` again."""
    runs = []
    for number, (on, uring, again) in enumerate(rates):
        runs += [
            make_run("on", round=number, rows_per_s=on, counted=counted),
            make_run("uring", round=number, rows_per_s=uring, counted=counted),
            make_run("uring", round=number, rows_per_s=again, counted=counted, again=True),
        ]
    return runs


def test_ratios_are_paired_within_a_round(make_run: MakeRun) -> None:
    # The device is ten times slower in the second round: that is in both, and no matter.
    found = summarise("cold", rounds_of(make_run, (100, 300, 330), (10, 40, 40)), ["on", "uring"], "uring")
    on, uring = found.arms
    assert uring.speedup_over == {"on": Paired.of([3.0, 4.0])}
    assert on.speedup_over == {"uring": Paired.of([100 / 300, 10 / 40])}
    assert on.rows_per_s == Spread(55.0, 10.0, 100.0)
    assert found.noise == Paired.of([1.1, 1.0])
    assert (found.rounds, found.counted_rounds, found.twice) == (2, 2, "uring")


def test_only_counted_rounds_make_the_numbers(make_run: MakeRun) -> None:
    runs = rounds_of(make_run, (100, 300, 300), (10, 90, 90))
    for run in runs[:3]:
        run.counted = False
    found = summarise("cold", runs, ["on", "uring"], "uring")
    assert found.arms[1].speedup_over["on"].median == 9.0
    assert (found.rounds, found.counted_rounds) == (2, 1)


def test_where_no_round_counts_all_make_the_numbers(make_run: MakeRun) -> None:
    runs = rounds_of(make_run, (100, 300, 300), (10, 90, 90), counted=False)
    found = summarise("cold", runs, ["on", "uring"], "uring")
    assert found.arms[1].speedup_over["on"] == Paired.of([3.0, 9.0])
    assert (found.rounds, found.counted_rounds) == (2, 0)


def test_attempts_that_were_broken_off_are_left_out(make_run: MakeRun) -> None:
    broken = [make_run("on", round=0, rows_per_s=1.0, counted=False)]
    found = summarise("cold", broken + rounds_of(make_run, (100, 300, 300)), ["on", "uring"], "uring")
    assert found.arms[0].rows_per_s == Spread(100.0, 100.0, 100.0)
    assert (found.rounds, found.counted_rounds) == (1, 1)
    found = summarise("cold", broken + rounds_of(make_run, (100, 300, 300), counted=False), ["on", "uring"], "uring")
    assert found.arms[0].rows_per_s == Spread(100.0, 100.0, 100.0)


def test_what_an_arm_is_comes_from_its_runs(make_run: MakeRun) -> None:
    runs = [
        make_run("a", user_s=0.002, ratio_to_take=0.8, backend_used="pread", fallback_reason="none here", workers=8),
        make_run("a", again=True),
    ]
    (arm,) = summarise("warm", runs, ["a"], "a").arms
    assert (arm.backend_used, arm.fallback_reason, arm.workers) == ("pread", "none here", 8)
    assert arm.user_us_per_row == Spread(2.0, 2.0, 2.0)
    assert arm.ratio_to_take == Spread(0.8, 0.8, 0.8)
    assert arm.rows_per_cpu_s == Spread(5e5, 5e5, 5e5)
    assert arm.ratio_to_device_limit is None
    assert arm.p50_us is None
