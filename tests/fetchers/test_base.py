import os
from pathlib import Path

import numpy as np

from lazyio.fetchers import Extent, FetcherOptions, ReadPlan, ReadStats, RowFetcher
from lazyio.fetchers.base import Bytes, Int64
from lazyio.fetchers.conformance import write_rows


class Ids(RowFetcher):
    """Gives each row its id, and keeps the ids it was asked for."""

    name = "ids"

    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        self.asked = ids.tolist()
        out[:] = ids[:, None]
        return ReadStats(reads=len(ids))


def test_counts_are_added_field_by_field() -> None:
    total = ReadStats(1, 2, 3, 4.0)
    total.add(ReadStats(10, 20, 30, 40.0))
    assert total == ReadStats(11, 22, 33, 44.0)


def test_windows_are_turned_into_rows(tmp_path: Path) -> None:
    """Also where a file has several extents, in another order than their rows."""
    made = write_rows(tmp_path, 10, [("a", 500, 20), ("b", 3, 5), ("a", 0, 50)])
    told: list[int] = []
    with Ids(made.extents, 10, FetcherOptions()) as fetcher:
        file, offset = np.array([0, 0, 1, 0], np.int32), np.array([500, 690, 13, 40])
        length = np.array([30, 10, 20, 10])
        plan = ReadPlan(file, offset, length, length, np.cumsum(length) - length, 70)
        buffer = np.full(80, 0xFF, np.uint8)
        stats = fetcher.read(plan, buffer, told.append)
        assert fetcher.asked == [0, 1, 2, 19, 21, 22, 29]
        assert buffer.tolist() == [row for row in fetcher.asked for _ in range(10)] + [0xFF] * 10
        assert (stats.reads, told) == (7, [4])


def test_files_are_opened_once_and_closed_at_the_end(tmp_path: Path) -> None:
    made = write_rows(tmp_path, 10, [("a", 0, 5), ("b", 0, 5), ("a", 50, 5)])
    before = len(os.listdir("/proc/self/fd"))
    with Ids([*made.extents, Extent(made.extents[0].path, 0, 15, 1)], 10, FetcherOptions()) as fetcher:
        assert len(fetcher.files.paths) == 2
        assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(os.listdir("/proc/self/fd")) == before
