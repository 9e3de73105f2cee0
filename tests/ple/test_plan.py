"""Dedup and read plans, against the plainest way to get the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.fetchers.base import Alignment, Extent, Int64
from lazyio.ple.plan import MAX_WINDOW_BYTES, Geometry, RowPlan, dedup, distinct_in_ranges

PROPERTY = settings(max_examples=100, deadline=None)

ids_of_any_size = st.lists(st.integers(0, 2**40), max_size=200)


@dataclass(frozen=True)
class Table:
    """Extents of a table, and some of its rows, ascending and distinct."""

    extents: tuple[Extent, ...]
    row_bytes: int
    block: int
    ids: Int64

    @property
    def files(self) -> dict[str, int]:
        names = dict.fromkeys(extent.path for extent in self.extents)
        return {name: number for number, name in enumerate(names)}

    def plan(self) -> RowPlan:
        return Geometry(self.extents, self.row_bytes, self.files).plan(self.ids, Alignment(self.block, self.block))

    def place(self, row: int) -> tuple[int, int]:
        """File and offset of a row, by looking at every extent."""
        for extent in self.extents:
            if extent.first_row <= row < extent.first_row + extent.rows:
                return self.files[extent.path], extent.offset + (row - extent.first_row) * self.row_bytes
        raise AssertionError(row)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    row_bytes = draw(st.sampled_from([1, 7, 90, 512, 5040, 300_000]))
    extents: list[Extent] = []
    rows, ends = 0, {"a": 0, "b": 0}
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from("ab"))
        offset = ends[path] + draw(st.sampled_from([0, 1, 131, 4096, 2**33]))
        count = draw(st.integers(1, 60))
        extents.append(Extent(path, offset, rows, count))
        rows += count
        ends[path] = offset + count * row_bytes
    ids = draw(st.sets(st.integers(0, rows - 1), min_size=1) | st.just(set(range(rows))))
    return Table(tuple(extents), row_bytes, draw(st.sampled_from([1, 512, 4096])), np.array(sorted(ids)))


# --- dedup -----------------------------------------------------------------------------------------------------------


@PROPERTY
@given(ids_of_any_size)
def test_dedup_is_what_numpy_does(ids: list[int]) -> None:
    unique, inverse = dedup(np.array(ids, np.int64))
    expected, back = np.unique(np.array(ids, np.int64), return_inverse=True)
    np.testing.assert_array_equal(unique, expected)
    np.testing.assert_array_equal(inverse, back)
    assert unique.dtype == inverse.dtype == np.int64


def test_dedup_leaves_its_input_alone() -> None:
    ids = np.array([5, 1, 5, 0])
    dedup(ids)
    assert ids.tolist() == [5, 1, 5, 0]


# --- plans -----------------------------------------------------------------------------------------------------------


@PROPERTY
@given(tables())
def test_every_row_is_where_the_plan_says(table: Table) -> None:
    plan = table.plan()
    reads = plan.reads
    assert len(plan.position) == len(table.ids)
    for window, (start, stop) in enumerate(zip(plan.first_row[:-1], plan.first_row[1:], strict=True)):
        assert start < stop, "a window without a row"
        for number in range(start, stop):
            file, offset = table.place(int(table.ids[number]))
            into = int(plan.position[number] - reads.dest[window])
            assert reads.file[window] == file
            assert reads.offset[window] + into == offset
            assert into >= 0
        assert reads.needed[window] == into + table.row_bytes, "what is needed ends with the last row"
    assert plan.first_row[0] == 0
    assert plan.first_row[-1] == len(table.ids)


@PROPERTY
@given(tables())
def test_windows_are_aligned_ordered_and_without_gaps_in_the_buffer(table: Table) -> None:
    reads = table.plan().reads
    assert (reads.offset % table.block == 0).all()
    assert (reads.length % table.block == 0).all()
    assert (reads.needed <= reads.length).all()
    assert (reads.needed > reads.length - table.block).all()
    np.testing.assert_array_equal(reads.dest, np.cumsum(reads.length) - reads.length)
    assert reads.buffer_bytes == reads.length.sum()
    assert reads.file.dtype == np.int32
    assert all(array.dtype == np.int64 for array in (reads.offset, reads.length, reads.needed, reads.dest))


@PROPERTY
@given(tables())
def test_windows_of_an_extent_ascend_and_merge_where_they_touch(table: Table) -> None:
    plan = table.plan()
    reads = plan.reads
    extent = np.searchsorted([each.first_row for each in table.extents], table.ids[plan.first_row[:-1]], side="right")
    most_rows = max(1, MAX_WINDOW_BYTES // table.row_bytes)
    assert (np.diff(extent) >= 0).all()
    for window in range(1, len(reads)):
        if extent[window] == extent[window - 1]:
            gap = reads.offset[window] - (reads.offset[window - 1] + reads.length[window - 1])
            full = plan.first_row[window] - plan.first_row[window - 1] == most_rows
            # A window that was cut for its size may share its last block with the next one.
            assert gap > 0 or full
            assert gap > -2 * table.block
    assert np.diff(plan.first_row).max() <= most_rows


@PROPERTY
@given(tables(), st.sampled_from([1, 4096, 20_000, 1 << 20]))
def test_pieces_are_the_plan_again(table: Table, buffer_bytes: int) -> None:
    plan = table.plan()
    windows = rows = 0
    for piece, first in plan.pieces(buffer_bytes):
        assert first == rows
        assert piece.reads.buffer_bytes == piece.reads.length.sum()
        assert piece.reads.buffer_bytes <= buffer_bytes or len(piece.reads) == 1
        assert piece.first_row[0] == 0
        assert piece.first_row[-1] == len(piece.position)
        cut = slice(windows, windows + len(piece.reads))
        shift = plan.reads.dest[windows]
        for name in ("file", "offset", "length", "needed"):
            np.testing.assert_array_equal(getattr(piece.reads, name), getattr(plan.reads, name)[cut])
        np.testing.assert_array_equal(piece.reads.dest, plan.reads.dest[cut] - shift)
        np.testing.assert_array_equal(piece.position, plan.position[rows : rows + len(piece.position)] - shift)
        windows += len(piece.reads)
        rows += len(piece.position)
    assert (windows, rows) == (len(plan.reads), len(table.ids))


def test_no_rows_make_an_empty_plan() -> None:
    for extents in ((Extent("a", 5, 0, 10),), (Extent("a", 5, 0, 10), Extent("b", 0, 10, 3))):
        plan = Geometry(extents, 90, {"a": 0, "b": 1}).plan(np.empty(0, np.int64), Alignment(512, 512))
        assert (len(plan.reads), plan.reads.buffer_bytes, len(plan.position)) == (0, 0, 0)
        assert sum(len(piece.reads) for piece, _ in plan.pieces(4096)) == 0


def test_rows_far_into_a_table_do_not_overflow() -> None:
    rows = 2**33
    geometry = Geometry((Extent("a", 3, 0, rows),), 21504, {"a": 0})
    plan = geometry.plan(np.array([0, 2**31, 2**32 + 1, rows - 1]), Alignment())
    assert plan.reads.offset.tolist() == [3 + row * 21504 for row in (0, 2**31, 2**32 + 1, rows - 1)]


def test_scattered_rows_have_a_window_each() -> None:
    plan = Geometry((Extent("a", 0, 0, 1000),), 90, {"a": 0}).plan(np.array([0, 100, 200]), Alignment(512, 512))
    assert plan.reads.length.tolist() == [512, 512, 512]
    assert plan.reads.needed.tolist() == [90, 9090 % 512, 18090 % 512]


# --- requests of any length ------------------------------------------------------------------------------------------


@PROPERTY
@given(
    st.lists(st.lists(st.integers(0, 500), max_size=40), max_size=12),
    st.integers(1, 60),
)
def test_distinct_ids_in_ranges_are_exact_and_bounded(chunks: list[list[int]], limit: int) -> None:
    arrays = [np.array(chunk, np.int64) for chunk in chunks]
    found: list[int] = []
    end = 0
    for low, high, distinct in distinct_in_ranges(lambda: iter(arrays), 501, limit):
        assert end <= low < high
        assert 0 < len(distinct) <= limit
        assert low <= distinct[0]
        assert distinct[-1] < high
        found += distinct.tolist()
        end = high
    assert found == sorted({row for chunk in chunks for row in chunk})


@pytest.mark.parametrize("limit", [64, 500])
def test_a_long_request_is_looked_at_about_twice_a_range(limit: int) -> None:
    ids = np.random.default_rng(3).integers(0, 1 << 30, 10_000)
    calls = 0

    def chunks() -> Iterator[Int64]:
        nonlocal calls
        calls += 1
        return iter(np.split(ids, 10))

    ranges = list(distinct_in_ranges(chunks, 1 << 30, limit))
    assert sum(len(distinct) for *_, distinct in ranges) == len(np.unique(ids))
    assert calls <= 2 * len(ranges)
    assert len(ranges) <= 4 * len(ids) / limit


# --- a handful of rows -----------------------------------------------------------------------------------------------


@PROPERTY
@given(tables(), st.randoms(use_true_random=False))
def test_a_plan_of_few_rows_in_any_order(table: Table, random: Random) -> None:
    asked = [int(random.choice(table.ids)) for _ in range(20)]
    geometry = Geometry(table.extents, table.row_bytes, table.files)
    reads, position = geometry.plan_few(asked, Alignment(table.block, table.block))
    wanted = geometry.plan(np.unique(asked), Alignment(table.block, table.block))
    if len(wanted.reads) == len(reads):  # a run beyond the longest window is cut at other rows
        for name in ("file", "offset", "length", "needed", "dest"):
            np.testing.assert_array_equal(getattr(reads, name), getattr(wanted.reads, name))
    assert reads.buffer_bytes == (reads.dest + reads.length)[-1]
    np.testing.assert_array_equal(reads.dest[1:], (reads.dest + reads.length)[:-1])
    assert not (reads.offset % table.block).any()
    assert not (reads.length % table.block).any()
    assert position.keys() == set(asked)
    for row, place in position.items():
        window = int(np.searchsorted(reads.dest, place, side="right")) - 1
        into = place - int(reads.dest[window])
        assert (int(reads.file[window]), int(reads.offset[window]) + into) == table.place(row)
        assert into + table.row_bytes <= reads.needed[window] <= reads.length[window]


@PROPERTY
@given(tables(), st.randoms(use_true_random=False))
def test_the_files_of_rows_are_those_of_their_places(table: Table, random: Random) -> None:
    ids = table.ids.tolist() * 2
    random.shuffle(ids)
    geometry = Geometry(table.extents, table.row_bytes, table.files)
    found = geometry.files_of(np.array(ids, np.int64))
    if len(table.files) > 1:
        assert found == sorted({table.place(row)[0] for row in ids})
    else:
        assert found == [0]
