from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lazyio.engine.kv.pool import NULL, Pool
from lazyio.errors import NoRoom

PAGES = 12


def test_pages_come_from_the_bottom_and_runs_from_the_top():
    pool = Pool(11)
    assert pool.take(3).tolist() == [1, 2, 3]
    assert pool.take_run(2).tolist() == [9, 10]
    assert pool.take_run(3).tolist() == [6, 7, 8]
    pool.give_back([2])
    assert pool.take(2).tolist() == [2, 4]
    pool.give_back([9, 10])
    assert pool.take_run(1).tolist() == [10]
    assert (pool.free, pool.used, pool.peak) == (2, 8, 9)


def test_a_run_needs_pages_in_a_row():
    pool = Pool(7)
    pool.take(6)
    pool.give_back([1, 3, 5, 6])
    assert pool.take_run(2).tolist() == [5, 6]
    with pytest.raises(NoRoom, match="2 pages in a row were asked for, and of 2 free ones no so many are"):
        pool.take_run(2)
    with pytest.raises(NoRoom, match="3 pages were asked for, and 2 of 6 are free"):
        pool.take(3)


@pytest.mark.parametrize("wrong", [[NULL], [3]])
def test_what_nobody_holds_is_neither_shared_nor_given_back(wrong: list[int]):
    pool = Pool(6)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.give_back(wrong)
    with pytest.raises(AssertionError):
        pool.share(wrong)


@given(held=st.sets(st.integers(1, PAGES - 1)), count=st.integers(1, PAGES))
def test_the_highest_gap_is_the_highest(held: set[int], count: int):
    pool = Pool(PAGES)
    pool.take(PAGES - 1)
    pool.give_back(sorted(set(range(1, PAGES)) - held))
    places = [first for first in range(1, PAGES - count + 1) if not held & set(range(first, first + count))]
    assert pool.has_run(count) == bool(places)
    if places:
        assert pool.take_run(count).tolist() == list(range(places[-1], places[-1] + count))


class Holding(RuleBasedStateMachine):
    """A pool beside a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(PAGES)
        self.held = [0] * PAGES

    @rule(count=st.integers(0, PAGES), is_run=st.booleans())
    def take(self, count: int, is_run: bool) -> None:
        free = [page for page in range(1, PAGES) if not self.held[page]]
        try:
            taken = (self.pool.take_run(count) if is_run else self.pool.take(count)).tolist()
        except NoRoom:
            assert is_run or count > len(free)
            return
        assert taken == (list(range(taken[0], taken[0] + count)) if is_run and count else free[:count])
        for page in taken:
            assert not self.held[page]
            self.held[page] = 1

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), is_shared=st.booleans())
    def share_or_give_back(self, data: st.DataObject, is_shared: bool) -> None:
        some = data.draw(st.sets(st.sampled_from([page for page in range(PAGES) if self.held[page]])))
        (self.pool.share if is_shared else self.pool.give_back)(sorted(some))
        for page in some:
            self.held[page] += 1 if is_shared else -1

    @invariant()
    def agrees(self) -> None:
        assert [self.pool.holders(page) for page in range(1, PAGES)] == self.held[1:]
        assert self.pool.used == int(np.count_nonzero(self.held)) == len(self.pool) - self.pool.free
        assert self.pool.used <= self.pool.peak <= len(self.pool)


TestHolding = Holding.TestCase
