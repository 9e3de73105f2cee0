"""What is wrong with rows, and how it is named."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import ReadError, TableSpec
from lazyio.fetchers.conformance import MadeTable
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


def test_closing_closes_what_is_verified_and_every_descriptor(made: MadeTable, spec: TableSpec) -> None:
    before = len(os.listdir("/proc/self/fd"))
    inner = Spoilt(made, lambda ids, rows: None)
    way = VerifiedRows(inner, spec.extents, spec.row_bytes, 1)
    assert len(os.listdir("/proc/self/fd")) > before
    way.close()
    assert inner.closed
    assert len(os.listdir("/proc/self/fd")) == before
