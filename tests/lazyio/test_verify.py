"""What is wrong with rows, and how it is named."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import LazyTable, ReadError, TableSpec, open_table
from lazyio.fetchers import Fetcher, ReadPlan, ReadStats
from lazyio.fetchers.base import Landed
from lazyio.fetchers.conformance import MadeTable
from lazyio.fetchers.wrapping import take_after
from lazyio.gate import TableStats
from lazyio.verify import VerifiedRows

Spoil = Callable[[np.ndarray, np.ndarray], None]


class Spoilt:
    """The right rows, with something done to them."""

    def __init__(self, made: MadeTable, spoil: Spoil) -> None:
        self._made, self._spoil, self.closed = made, spoil, False

    def gather(self, asked: np.ndarray, rows: np.ndarray, stats: TableStats) -> None:
        rows[:] = self._made.content[asked.reshape(-1)]
        self._spoil(asked.reshape(-1), rows)

    read = gather

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gather(made: MadeTable, spec: TableSpec) -> Iterator[Callable[..., None]]:
    ways: list[VerifiedRows] = []

    def run(ids: Any, spoil: Spoil = lambda ids, rows: None, count: int = 200, by: str = "gather") -> None:
        asked = np.asarray(ids)
        ways.append(VerifiedRows(Spoilt(made, spoil), spec.extents, spec.row_bytes, count))
        getattr(ways[-1], by)(asked, np.empty((asked.size, spec.row_bytes), np.uint8), TableStats())

    yield run
    for way in ways:
        way.close()


def offset_of(made: MadeTable, row: int) -> tuple[str, int]:
    extent = next(extent for extent in made.extents if extent.first_row <= row < extent.first_row + extent.rows)
    return extent.path, extent.offset + (row - extent.first_row) * made.row_bytes


@pytest.mark.parametrize("by", ["gather", "read"])
def test_right_rows_pass(gather: Callable[..., None], by: str) -> None:
    gather(np.arange(4201), count=20_000, by=by)
    gather([4200], count=3, by=by)
    gather(np.empty(0, np.int64), by=by)
    gather(np.arange(0, 4200, 2).reshape(-1, 3).T, count=1000)  # of any shape, and in any order in memory


@pytest.mark.parametrize("by", ["gather", "read"])
@pytest.mark.parametrize("row", [0, 1999, 2000, 3499, 3500, 4199, 4200])
def test_a_row_that_differs_is_named(gather: Callable[..., None], made: MadeTable, row: int, by: str) -> None:
    def spoil(ids: np.ndarray, rows: np.ndarray) -> None:
        rows[ids == row, 40] ^= 1

    path, offset = offset_of(made, row)
    with pytest.raises(ReadError) as raised:
        gather([row], spoil, by=by)
    error = raised.value
    assert (error.path, error.offset, error.wanted, error.got) == (path, offset, 90, 90)
    assert f"row {row} was gathered with other bytes than {path} has at offset {offset}" in str(error)
    assert "they differ from byte 40 of the row on, of 90" in str(error)


@pytest.mark.parametrize("step", [1, -1])
def test_a_wrong_offset_is_named(gather: Callable[..., None], made: MadeTable, step: int) -> None:
    def spoil(ids: np.ndarray, rows: np.ndarray) -> None:
        rows[:] = made.content[ids + step]

    with pytest.raises(
        ReadError, match=rf"row 700 was .*; what was gathered is row {700 + step}: it was read at a wrong"
    ):
        gather([700], spoil)


def test_what_a_short_read_leaves_is_named(gather: Callable[..., None]) -> None:
    def spoil(ids: np.ndarray, rows: np.ndarray) -> None:
        rows[:, 64:] = 0xFF

    with pytest.raises(ReadError, match="they differ from byte 64 of the row on, of 90, as after a short read"):
        gather(np.arange(500), spoil, count=1)


def test_a_file_that_is_cut_is_named(gather: Callable[..., None], tmp_path: Path) -> None:
    os.truncate(tmp_path / "a", 131 + 89)
    with pytest.raises(ReadError, match="the file ends 1 bytes before the end of the row") as raised:
        gather([0])
    assert (raised.value.wanted, raised.value.got) == (90, 89)


def test_rows_of_a_gather_are_chosen_anew_each_time(gather: Callable[..., None]) -> None:
    def spoil(ids: np.ndarray, rows: np.ndarray) -> None:
        rows[:] = 0

    named = set()
    for _ in range(40):
        with pytest.raises(ReadError) as raised:
            gather(np.arange(16), spoil, count=1)
        named.add(raised.value.offset)
    assert len(named) > 8


def test_what_is_read_once_more_is_on_its_way_during_the_gather(
    gather: Callable[..., None], made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *advice: told.append(advice))

    def spoil(ids: np.ndarray, rows: np.ndarray) -> None:
        assert told[-1] == (offset_of(made, 700)[1], 90, os.POSIX_FADV_WILLNEED)
        told.append((0, 0, 0))

    gather([700], spoil)
    assert told[-1] == (0, 0, 0)


def test_closing_closes_what_is_verified_and_every_descriptor(made: MadeTable, spec: TableSpec) -> None:
    before = len(os.listdir("/proc/self/fd"))
    inner = Spoilt(made, lambda ids, rows: None)
    way = VerifiedRows(inner, spec.extents, spec.row_bytes, 1)
    assert len(os.listdir("/proc/self/fd")) > before
    way.close()
    assert inner.closed
    assert len(os.listdir("/proc/self/fd")) == before


# --- of a table ------------------------------------------------------------------------------------------------------


class Shifted(Fetcher):
    """Takes every row for the one before."""

    def __init__(self, inner: Fetcher) -> None:
        take_after(self, inner)
        self.inner = inner

    def read(self, plan: ReadPlan, buffer: np.ndarray, landed: Landed | None = None) -> ReadStats:
        plan = replace(plan, offset=np.maximum(plan.offset - self.row_bytes, 0))
        return self.inner.read(plan, buffer, landed)

    def close(self) -> None:
        self.inner.close()


class Careless(Shifted):
    """Takes what a read brings for what was asked."""

    def read(self, plan: ReadPlan, buffer: np.ndarray, landed: Landed | None = None) -> ReadStats:
        stats = self.inner.read(plan, buffer)
        for dest in plan.dest.tolist():
            buffer[dest + 50 : dest + self.row_bytes] = 0
        return stats


def open_staged(spec: TableSpec, wrap: Callable[[Fetcher], Fetcher], **more: Any) -> LazyTable:
    """A table that takes its rows out of what a buffered fetcher reads, and not out of a map of it."""

    def staged(fetcher: Fetcher) -> Fetcher:
        wrapped = wrap(fetcher)
        wrapped.direct_io = True
        return wrapped

    return open_table(spec, mode="on-direct", direct_io="off", wrap=staged, **more)


def test_every_way_passes(open_way: Callable[..., LazyTable], spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec, verify=50) as table:
        for ids in (np.arange(4201), np.array([3, 3, 4200]), np.empty(0, np.int64)):
            np.testing.assert_array_equal(table.gather(ids), made.content[ids])
        rows, _ = table.gather_unique([9, 2, 9])
        np.testing.assert_array_equal(rows, made.content[[2, 9]])
        rows, _ = table.prefetch([9, 2, 9]).result()
        np.testing.assert_array_equal(rows, made.content[[2, 9]])


@pytest.mark.parametrize("ids", [np.arange(900, 1400), np.array([900, 1300])])
def test_a_fetcher_that_reads_at_a_wrong_offset_is_found(spec: TableSpec, ids: np.ndarray) -> None:
    with open_staged(spec, Shifted, verify=4) as table:
        for gather in (table.gather, table.gather_unique, lambda ids: table.prefetch(ids).result()):
            with pytest.raises(ReadError, match=r"what was gathered is row \d+: it was read at a wrong offset"):
                gather(ids)


def test_a_fetcher_that_takes_short_reads_for_whole_is_found(spec: TableSpec) -> None:
    with (
        open_staged(spec, Careless, verify=1) as table,
        pytest.raises(ReadError, match=r"differ from byte 50 .* short"),
    ):
        table.gather(np.arange(0, 1900, 2))


def test_unless_asked_nothing_is_verified(spec: TableSpec) -> None:
    with open_staged(spec, Shifted) as table:
        table.gather(np.arange(900, 1400))


def test_the_environment_asks_for_it(spec: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYIO_VERIFY", "2")
    with open_staged(spec, Shifted) as table, pytest.raises(ReadError, match="wrong offset"):
        table.gather(np.arange(900, 1400))


def test_edited_rows_are_not_compared_with_stored_ones(spec: TableSpec) -> None:
    edited = {row: bytes(90) for row in range(20)}
    with open_table(spec, mode="on", overlay=edited, verify=50) as table:
        assert not table.gather(np.arange(20)).any()
