from pathlib import Path

import numpy as np
import pytest

from lazyio.fetchers import FetcherOptions, mapping
from lazyio.fetchers.base import Bytes
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.fetchers.mmap import MmapFetcher


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeTable:
    monkeypatch.setattr(mapping, "_major_faults", lambda: 0)
    return write_rows(tmp_path, 90, [("a", 77, 3000)])


def taken(fetcher: MmapFetcher, table: MadeTable, ids: list[int]) -> tuple[int, int]:
    """Take rows and check them; reads and bytes that it took."""
    out: Bytes = np.zeros((len(ids), 90), np.uint8)
    stats = fetcher.take(np.array(ids), out)
    np.testing.assert_array_equal(out, table.content[ids])
    return stats.reads, stats.bytes_read


def test_reads_are_the_ranges_that_were_advised(table: MadeTable) -> None:
    with MmapFetcher(table.extents, 90, FetcherOptions()) as fetcher:
        ids = [0, 1, 500, 1000, 1030]
        pages = 4096
        assert taken(fetcher, table, ids) == (3, 4 * pages)
        assert taken(fetcher, table, ids) == (0, 0)


def test_the_bare_way_advises_nothing(table: MadeTable) -> None:
    with MmapFetcher(table.extents, 90, FetcherOptions(advice=False)) as fetcher:
        assert taken(fetcher, table, [0, 500, 1000]) == (0, 0)
        assert fetcher.fell_back is None


def test_pages_given_back_by_the_kernel_are_advised_again(table: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(range(0, 1000, 10))
    with MmapFetcher(table.extents, 90, FetcherOptions()) as fetcher:
        taken(fetcher, table, [0, 1000])
        with monkeypatch.context() as patch:
            patch.setattr(mapping, "_major_faults", lambda: next(told))
            assert taken(fetcher, table, [0, 1000]) == (10, 10 * 4096)
        assert taken(fetcher, table, [0, 1000])[0] == 2
