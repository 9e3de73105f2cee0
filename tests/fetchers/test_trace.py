from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lazyio.fetchers import Extent, Fetcher, FetcherOptions, RowFetcher, load
from lazyio.fetchers.conformance import FetcherConformance, write_rows
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.fetchers.trace import TracedFetcher, TracedRowFetcher, traced

Told = list[tuple[float, float, int, int]]


class TestAroundReads(FetcherConformance):
    name = "pread"

    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        fetcher = traced(load(self.name)(extents, row_bytes, FetcherOptions()))
        self.told: Told = []
        fetcher.listener = lambda *read: self.told.append(read)
        return fetcher


class TestAroundRows(TestAroundReads):
    name = "mmap"


@pytest.mark.parametrize(("name", "kind"), [("pread", TracedFetcher), ("resident", TracedRowFetcher)])
def test_every_read_is_told(tmp_path: Path, name: str, kind: type[Fetcher]) -> None:
    made = write_rows(tmp_path, 90, [("a", 77, 500)])
    inner = load(name)(made.extents, 90, FetcherOptions(direct_io="off"))
    with traced(with_faults(inner, Faults(late=1, delay_s=0.002))) as fetcher:
        assert isinstance(fetcher, kind)
        plan = made.plan(fetcher, np.arange(0, 500, 5)).reads
        buffer = np.empty(plan.buffer_bytes, np.uint8)
        fetcher.read(plan, buffer)  # nobody listens
        told: Told = []
        fetcher.listener = lambda *read: told.append(read)
        fetcher.read(plan, buffer)
        if isinstance(fetcher, RowFetcher):
            fetcher.take(np.arange(3), np.empty((3, 90), np.uint8))
    sizes = [(100, 9000), (3, 270)] if isinstance(fetcher, RowFetcher) else [(100, 9000)]
    assert [(windows, size) for _, _, windows, size in told] == sizes
    assert all(seconds >= 0.002 for _, seconds, _, _ in told), "a slow disk shows"
