"""Cuts: all tokens, within their bounds, and no slower than any others."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio import SettingError
from lazyio.ple.cuts import Pace, fixed_cuts, makespan_s, plan_cuts

# A prompt that the device reads nearly as fast as the trunk computes.
READS, LIMIT, TOKENS_PER_S, UBATCH = 13.4, 90e3, 6e3, 2048
COSTS = st.sampled_from([0.0, 1e-4, 5e-3])


def over_the_greater_sum(cuts: list[int], pace: Pace) -> float:
    return pace.makespan_s(cuts) / max(sum(pace.reads_s(cuts)), sum(pace.computes_s(cuts)))


@pytest.mark.parametrize(
    ("reads_s", "computes_s", "expected"),
    [
        ([], [], 0),
        ([2], [3], 5),
        ([1, 1, 1], [3, 3, 3], 10),
        ([3, 3, 3], [1, 1, 1], 10),
        ([1, 4, 1], [2, 1, 1], 7),
    ],
)
def test_makespan(reads_s: list[float], computes_s: list[float], expected: float) -> None:
    assert makespan_s(reads_s, computes_s) == expected


def test_makespan_is_the_longest_way_through() -> None:
    reads, computes = [3.0, 1.0, 4.0, 1.0, 5.0], [2.0, 7.0, 1.0, 8.0, 2.0]
    longest = max(sum(reads[: turn + 1]) + sum(computes[turn:]) for turn in range(5))
    assert makespan_s(reads, computes) == longest


def test_a_prompt_of_one_ubatch_is_read_behind_its_computing() -> None:
    pace = Pace(READS / LIMIT, 1 / TOKENS_PER_S, 0.5e-3, 2e-3)
    cuts = plan_cuts(2048, READS, LIMIT, TOKENS_PER_S, UBATCH)
    assert 1.85 < over_the_greater_sum([2048], pace) < 1.95
    assert over_the_greater_sum(cuts, pace) < 1.1
    # Against the sums of one ubatch, which pays the fixed cost once, the many of them still gain.
    assert pace.makespan_s(cuts) < 1.15 * max(sum(pace.reads_s([2048])), sum(pace.computes_s([2048])))
    assert cuts[0] < 128


def test_the_longer_stage_has_the_small_ubatch_at_its_own_end() -> None:
    slow_trunk = plan_cuts(4096, READS, LIMIT, TOKENS_PER_S / 3, UBATCH)
    assert slow_trunk[0] < 128 < slow_trunk[-1]
    slow_disk = plan_cuts(4096, READS, LIMIT / 3, TOKENS_PER_S, UBATCH)
    assert slow_disk[-1] < 128 < slow_disk[0]


def test_a_costly_ubatch_is_not_cut() -> None:
    assert plan_cuts(512, READS, LIMIT, TOKENS_PER_S, UBATCH, compute_fixed_s=1.0) == [512]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 5000),
    reads=st.floats(0.5, 50),
    rate=st.floats(100, 50_000),
    ubatch=st.integers(1, 2048),
    step=st.sampled_from([1, 32, 256]),
    read_fixed_s=COSTS,
    compute_fixed_s=COSTS,
)
def test_cuts_are_whole_and_never_worse_than_fixed_ones(
    tokens: int, reads: float, rate: float, ubatch: int, step: int, read_fixed_s: float, compute_fixed_s: float
) -> None:
    tokens = min(tokens, 40 * ubatch)  # so that examples stay quick
    cuts = plan_cuts(
        tokens, reads, LIMIT, rate, ubatch, step=step, read_fixed_s=read_fixed_s, compute_fixed_s=compute_fixed_s
    )
    assert sum(cuts) == tokens
    assert all(0 < cut <= ubatch for cut in cuts)
    step = min(step, ubatch)
    assert all(cut % step == 0 for cut in cuts[:-1])
    pace = Pace(reads / LIMIT, 1 / rate, read_fixed_s, compute_fixed_s)
    fixed = fixed_cuts(tokens, ubatch // step * step)
    assert pace.makespan_s(cuts) <= pace.makespan_s(fixed) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    ubatch=st.integers(1, 9),
    read_s=st.floats(0.1, 10),
    compute_s=st.floats(0.1, 10),
    read_fixed_s=st.sampled_from([0.0, 0.3, 2.0]),
    compute_fixed_s=st.sampled_from([0.0, 0.3, 2.0]),
)
def test_no_other_cuts_are_faster(
    tokens: int, ubatch: int, read_s: float, compute_s: float, read_fixed_s: float, compute_fixed_s: float
) -> None:
    pace = Pace(read_s, compute_s, read_fixed_s, compute_fixed_s)
    cuts = plan_cuts(
        tokens, read_s, 1.0, 1 / compute_s, ubatch, step=1, read_fixed_s=read_fixed_s, compute_fixed_s=compute_fixed_s
    )
    best = min(pace.makespan_s(other) for other in all_cuts(tokens) if max(other) <= ubatch)
    assert pace.makespan_s(cuts) <= best * (1 + 1e-4)


def all_cuts(tokens: int) -> list[list[int]]:
    found = []
    for cut_here in itertools.product([False, True], repeat=tokens - 1):
        edges = [0, *(place for place, cut in enumerate(cut_here, 1) if cut), tokens]
        found.append([stop - start for start, stop in itertools.pairwise(edges)])
    return found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_tokens": -1}, "n_tokens is -1; it must be finite and 0 or more"),
        ({"limit_reads_per_s": 0}, "limit_reads_per_s is 0; it must be finite and more than 0"),
        ({"tokens_per_s": float("nan")}, "tokens_per_s is nan; it must be finite and more than 0"),
        ({"tokens_per_s": float("inf")}, "tokens_per_s is inf; it must be finite and more than 0"),
        ({"read_fixed_s": float("inf")}, "read_fixed_s is inf; it must be finite and 0 or more"),
        ({"ubatch_max": 0}, "ubatch_max is 0"),
        ({"step": 0}, "step is 0"),
        ({"compute_fixed_s": -1e-3}, "compute_fixed_s is -0.001; it must be finite and 0 or more"),
    ],
)
def test_numbers_that_can_not_be_are_refused(given: dict[str, float], message: str) -> None:
    usual = {
        "n_tokens": 100,
        "reads_per_token": READS,
        "limit_reads_per_s": LIMIT,
        "tokens_per_s": 1.0,
        "ubatch_max": 64,
    }
    with pytest.raises(SettingError, match=message):
        plan_cuts(**{**usual, **given})  # type: ignore[arg-type]
