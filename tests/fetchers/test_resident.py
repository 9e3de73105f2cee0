import os
from pathlib import Path

import numpy as np
import pytest

from lazyio.bench.residency import drop_pages, page_ranges, resident_pages
from lazyio.errors import NeverFits, ReadError
from lazyio.fetchers import FetcherOptions, resident
from lazyio.fetchers.base import Bytes, Extent
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.fetchers.resident import ResidentFetcher
from lazyio.host import io_counters
from lazyio.ple.raw import raw_table


@pytest.fixture
def table(tmp_path: Path) -> MadeTable:
    return write_rows(tmp_path, 90, [("a", 77, 3000), ("b", 5, 1000)])


def take(fetcher: ResidentFetcher, ids: list[int]) -> Bytes:
    out: Bytes = np.zeros((len(ids), 90), np.uint8)
    fetcher.take(np.array(ids), out)
    return out


def test_files_are_read_in_several_chunks(table: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_CHUNK_BYTES", 1000)
    with ResidentFetcher(table.extents, 90, FetcherOptions()) as fetcher:
        np.testing.assert_array_equal(take(fetcher, [3999, 0, 3000, 2999]), table.content[[3999, 0, 3000, 2999]])


def test_nothing_is_read_any_more_once_it_is_open(table: MadeTable) -> None:
    with ResidentFetcher(table.extents, 90, FetcherOptions()) as fetcher:
        before = io_counters()
        os.truncate(table.extents[0].path, 0)
        Path(table.extents[1].path).unlink()
        np.testing.assert_array_equal(take(fetcher, [7, 3500]), table.content[[7, 3500]])
        after = io_counters()
        # Looking at the counters is a read of its own.
        assert before is None or after is None or after.syscr - before.syscr <= 3


@pytest.mark.parametrize(("reserve", "available"), [(1 << 60, None), (0, 359_999), (1, 360_000)])
def test_what_does_not_fit_is_refused_before_anything_is_read(
    table: MadeTable, monkeypatch: pytest.MonkeyPatch, reserve: int, available: int | None
) -> None:
    if available is not None:
        monkeypatch.setattr(resident, "available_memory_bytes", lambda: available)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("it was read"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        NeverFits, match=r"takes 351\.6 KiB of memory .*use mode uring, on-direct or on, or lower reserve"
    ):
        ResidentFetcher(table.extents, 90, FetcherOptions(reserve_bytes=reserve))
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_leaves_nothing_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(np.random.default_rng(0).bytes(20_000_000))
    spec = raw_table(path, row_bytes=90, offset=77)
    for pages in page_ranges(spec):
        drop_pages(pages)
    if resident_pages(spec):
        pytest.skip("this filesystem drops nothing from the page cache")
    ResidentFetcher(spec.extents, 90, FetcherOptions()).close()
    assert resident_pages(spec) == 0


def test_what_just_fits_is_loaded(table: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "available_memory_bytes", lambda: 360_000)
    ResidentFetcher(table.extents, 90, FetcherOptions()).close()


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    made = write_rows(tmp_path, 90, [("a", 77, 100)])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReadError, match="a ends at 9077, 90 bytes before the end of the table") as caught:
        ResidentFetcher([Extent(made.extents[0].path, 77, 0, 101)], 90, FetcherOptions())
    assert caught.value.offset == 9077
    assert len(os.listdir("/proc/self/fd")) == before
