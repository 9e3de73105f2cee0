from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.engine.kv.pool import NULL, PAGE
from lazyio.engine.kv.tables import Table, stacked


def table(*pages: int) -> Table:
    return Table(np.array(pages, np.int32))


@given(
    pages=st.lists(st.integers(1, 40), unique=True, max_size=5),
    first=st.integers(0, 5 * PAGE),
    count=st.integers(0, 300),
    ratio=st.sampled_from([1, 4, 64]),
)
def test_slots_are_those_of_the_positions(pages: list[int], first: int, count: int, ratio: int):
    each = PAGE // ratio
    expected = [
        (pages[entry // each] if entry // each < len(pages) else NULL) * each + entry % each
        for entry in range(first, first + count)
    ]
    assert table(*pages).slots(first, count, ratio).tolist() == expected


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2)])
def test_pages_that_cover_tokens(tokens: int, pages: int):
    assert table(7, 3, 9).covering(tokens).tolist() == [7, 3, 9][:pages]


def test_tables_of_several_lanes_end_in_the_null_page():
    assert stacked([table(4, 5), table(), table(2)]).tolist() == [[4, 5], [NULL, NULL], [2, NULL]]
    assert stacked([table(4)], width=3).tolist() == [[4, NULL, NULL]]
    assert stacked([]).shape == (0, 0)


def test_a_table_does_not_change():
    with pytest.raises(ValueError, match="read-only"):
        table(1).pages[0] = 2


@pytest.mark.parametrize(("first", "most", "found"), [(0, 0, 1), (0, 5, 3), (0, 2, 2), (1, 5, 2), (2, 5, 1), (3, 9, 1)])
def test_pages_in_a_row(first: int, most: int, found: int):
    assert table(4, 5, 6, 2).in_a_row(first, most) == found
