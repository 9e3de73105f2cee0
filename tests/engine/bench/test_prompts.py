from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.bench.gauge import Counters
from lazyio.engine.bench.prompts import Timed, new_rows, with_floors
from lazyio.engine.bench.rig import PromptRun
from lazyio.engine.bench.ways import Way
from lazyio.gate import TableStats
from lazyio.modes import Backend

BACKEND = Backend("on", "mmap", False, 1, 1, 1, None, "as asked")


def timed(way: Way, computes: list[float], limits: tuple[float, float] | None = (100.0, 100.0)) -> Timed:
    waits = (0.0,) * len(computes)
    return Timed(way, False, PromptRun(1.0, tuple(computes), waits, TableStats(), Counters(), BACKEND, ""), limits)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.integers(1, 3),
    st.data(),
)
def test_new_rows_are_those_of_no_ubatch_before(ids: list[int], heads: int, data: st.DataObject) -> None:
    rows = np.array(ids[: len(ids) // heads * heads], np.int64).reshape(-1, heads)
    cuts, left = list[int](), len(rows)
    while left:
        cuts.append(data.draw(st.integers(1, left)))
        left -= cuts[-1]
    seen: set[int] = set()
    expected = []
    for chunk in np.split(rows, np.cumsum(cuts)[:-1]) if cuts else []:
        expected.append(sorted(set(chunk.reshape(-1).tolist()) - seen))
        seen |= set(chunk.reshape(-1).tolist())
    assert [part.tolist() for part in new_rows(rows, cuts)] == expected


def test_the_floor_is_a_pipeline_of_reads_at_the_limit_and_of_computing_beside_a_resident_table() -> None:
    off, uring = Way("off", 2), Way("uring", 2)
    turns = [timed(off, [1.0, 3.0]), timed(uring, [9.0, 9.0], (50.0, 150.0)), timed(off, [3.0, 1.0])]
    judged = with_floors(turns, reads=[100, 400])
    # Reads take 1 s and 4 s at 100 a second, computing 2 s each time.
    assert [each.floor_s for each in judged] == [4.0, 1 + 4 + 2, 4.0]


def test_without_a_limit_computing_is_the_floor() -> None:
    turns = [timed(Way("off", 0), [1.0, 2.0], None), timed(Way("on", 0), [5.0, 5.0], None)]
    assert [each.floor_s for each in with_floors(turns, [10, 10])] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("limits", "steady"), [((100.0, 131.0), False), ((131.0, 100.0), False), ((100.0, 129.0), True)]
)
def test_a_device_that_changed_is_not_steady(limits: tuple[float, float], steady: bool) -> None:
    assert timed(Way("on", 0), [1.0], limits).steady is steady
