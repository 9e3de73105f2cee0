from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lazyio.bench.abba.definition import plan_of
from lazyio.bench.abba.journal import CellRecord, Run
from lazyio.bench.abba.judge import (
    FASTER,
    SLOWER,
    WITHIN,
    CellResult,
    Level,
    disagreement,
    judged,
    noise_of,
    times_as_fast,
    verdict_of,
)
from lazyio.bench.abba.paths import Place
from lazyio.bench.abba.plan import Metric, Plan
from lazyio.bench.summary import Paired

MakePlan = Callable[..., Plan]
MakeRun = Callable[..., Run]
values = st.floats(0.01, 1000)
pairs = st.lists(st.tuples(values, values), min_size=2, max_size=12)


def metric(better: str | None) -> Metric:
    return Metric("x", Place.parse("metrics.x"), better)


def result(make_plan: MakePlan, make_run: MakeRun, rounds: list[tuple[float, float, float]], better: str) -> CellResult:
    """Of rounds of a, b and a again."""
    plan = make_plan(metrics={"x": {"better": better}}, rounds=len(rounds))
    turns = [[make_run("a", a), make_run("b", b), make_run("a", again, again=True)] for a, b, again in rounds]
    # Rounds are in the order of their turns, every other one backwards.
    record = CellRecord(rounds=[each[::-1] if number % 2 else each for number, each in enumerate(turns)])
    return judged(plan, "all", record)


@pytest.mark.parametrize("better", ["lower", "higher"])
@pytest.mark.parametrize("factor", [0.8, 0.97, 1.0, 1.03, 1.25])
def test_an_arm_beside_a_known_noise(make_plan: MakePlan, make_run: MakeRun, better: str, factor: float) -> None:
    rounds = [(10.0, 10.0 * factor, 10.1), (10.1, 10.1 * factor, 10.0), (10.0, 10.0 * factor, 10.1)] * 2
    (of_metric,) = result(make_plan, make_run, rounds, better).metrics
    a, b, again = of_metric.arms
    ratios = [10 / 10.1, 10.1 / 10, 10 / 10.1] * 2
    if better == "higher":
        ratios = [1 / ratio for ratio in ratios]
    expected = abs(statistics.fmean(ratios) - 1) + 2 * statistics.stdev(ratios) / math.sqrt(6)
    assert of_metric.noise == pytest.approx(expected)
    assert expected < 0.02
    fast = factor if better == "higher" else 1 / factor
    assert b.times_as_fast is not None
    assert b.times_as_fast.median == pytest.approx(fast)
    assert b.verdict == (SLOWER if fast < 0.98 else FASTER if fast > 1.02 else WITHIN)
    assert b.seen_from == pytest.approx(expected, abs=1e-6)  # all its ratios are the same
    assert (a.times_as_fast, a.verdict) == (None, None)
    assert again.again
    assert again.verdict is None
    assert again.times_as_fast is not None
    assert again.times_as_fast.slower == (4 if better == "lower" else 2)


@given(pairs, st.sampled_from(["lower", "higher"]))
def test_pairs_are_of_one_round(rows: list[tuple[float, float]], better: str) -> None:
    mine, reference = zip(*rows, strict=True)
    paired = times_as_fast(metric(better), mine, reference)
    assert paired is not None
    ratios = sorted(m / r if better == "higher" else r / m for m, r in rows)
    assert (paired.low, paired.high, paired.rounds) == (ratios[0], ratios[-1], len(rows))
    assert paired.median == pytest.approx(statistics.median(ratios))
    assert paired.mean == pytest.approx(sum(ratios) / len(ratios))
    assert paired.slower == sum(m < r if better == "higher" else m > r for m, r in rows)


@given(pairs, st.floats(0.1, 10))
def test_drift_from_round_to_round_cancels(rows: list[tuple[float, float]], drift: float) -> None:
    mine, reference = zip(*rows, strict=True)
    plain = times_as_fast(metric("lower"), mine, reference)
    drifted = [[value * drift**place for place, value in enumerate(column)] for column in (mine, reference)]
    paired = times_as_fast(metric("lower"), *drifted)
    assert plain is not None
    assert paired is not None
    assert paired.mean == pytest.approx(plain.mean, rel=1e-6)


@given(pairs)
def test_lower_and_higher_are_each_others_mirror(rows: list[tuple[float, float]]) -> None:
    mine, reference = zip(*rows, strict=True)
    low = times_as_fast(metric("lower"), mine, reference)
    high = times_as_fast(metric("higher"), reference, mine)
    assert low == high
    assert times_as_fast(metric(None), mine, reference) is None


@given(st.floats(0, 2), st.floats(0, 1), st.floats(0, 1))
def test_verdicts_exclude_each_other(mean: float, two_se: float, noise: float) -> None:
    paired = Paired(mean, mean, mean, mean, two_se, 0, 2)
    verdict = verdict_of(paired, noise)
    under, over = (1 - noise) - (mean + two_se), (mean - two_se) - (1 + noise)
    assume(min(abs(under), abs(over)) > 1e-9)
    assert (verdict == SLOWER) == (under > 0)
    assert (verdict == FASTER) == (over > 0)
    # What is within the noise stays there when there is more of either.
    if verdict == WITHIN:
        assert verdict_of(paired, noise + 0.1) == WITHIN


@given(st.lists(values, min_size=2, max_size=12))
def test_the_noise_of_an_arm_is_never_beyond_itself(ratios: list[float]) -> None:
    paired = Paired.of(ratios)
    assert paired is not None
    assert verdict_of(paired, noise_of(paired)) == WITHIN


def test_a_single_pair_says_nothing() -> None:
    single = Paired.of([0.01])
    assert single is not None
    assert noise_of(single) == math.inf
    assert verdict_of(single, 0.0) == WITHIN


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_levels(numbers: list[float]) -> None:
    level = Level.of(numbers)
    assert level.low <= level.mean + 1e-6
    assert level.mean <= level.high + 1e-6
    assert (level.two_se is None) == (len(numbers) == 1)
    if len(numbers) > 1:
        assert level.two_se == pytest.approx(2 * statistics.stdev(numbers) / math.sqrt(len(numbers)))


def test_a_cell_that_is_not_complete_is_not_judged(make_plan: MakePlan, make_run: MakeRun) -> None:
    turns = [make_run("a", 1.0), make_run("b", 9.0), make_run("a", 1.0, again=True)]
    partly = judged(make_plan(rounds=4), "all", CellRecord(rounds=[turns] * 3))
    assert not partly.complete
    assert partly.metrics[0].noise is None
    assert [arm.verdict for arm in partly.metrics[0].arms] == [None] * 3
    assert partly.metrics[0].arms[1].times_as_fast is not None
    assert partly.slower == []
    whole = judged(make_plan(rounds=4), "all", CellRecord(rounds=[turns] * 4))
    assert [(each.name, arm.arm) for each, arm in whole.slower] == [("x", "b")]


def test_a_void_cell_has_no_figures(make_plan: MakePlan, make_run: MakeRun) -> None:
    turns = [make_run("a", 1.0), make_run("b", 9.0), make_run("a", 1.0, again=True)]
    void = judged(make_plan(), "all", CellRecord(rounds=[turns] * 2, void="differ"))
    assert (void.complete, void.metrics, void.void) == (False, (), "differ")
    begun = judged(make_plan(), "all", CellRecord())
    assert (begun.complete, begun.metrics) == (False, ())


def test_what_must_be_equal(make_run: MakeRun) -> None:
    runs = [make_run("a", 1.0), make_run("b", 2.0)]
    assert disagreement([]) is None
    assert disagreement(runs) is None
    other = make_run("a", 1.0, again=True, equal={"tokens": "t", "logits": "m"})
    assert disagreement([*runs, other]) == "logits is l of a and m of a (again)"


def paired_runs(plan: Plan, make_run: MakeRun, draw: Any) -> CellRecord:
    return CellRecord(
        rounds=[[make_run(arm, draw()) for arm in plan.arms] + [make_run("a", draw(), again=True)] for _ in range(6)]
    )


@settings(max_examples=20)
@given(st.data(), st.integers(2, 5))
def test_every_arm_is_there_once_and_the_reference_twice(data: st.DataObject, count: int) -> None:
    arms = {chr(ord("a") + number): {"command": f"run {number}"} for number in range(count)}
    plan = plan_of({"arms": arms, "metrics": {"x": {"better": "lower"}}})

    def make(arm: str, x: float, again: bool = False) -> Run:
        return Run(arm, again, {"x": x}, {}, 1.0, 1.0, "", None, {}, {})

    (of_metric,) = judged(plan, "all", paired_runs(plan, make, lambda: data.draw(values))).metrics
    assert [(arm.arm, arm.again) for arm in of_metric.arms] == [*((arm, False) for arm in arms), ("a", True)]
    assert [arm.verdict is None for arm in of_metric.arms] == [True, *[False] * (count - 1), True]
