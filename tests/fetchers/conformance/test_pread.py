from collections.abc import Sequence

import pytest

from lazyio.fetchers import Extent, Fetcher, FetcherOptions
from lazyio.fetchers.conformance import FetcherConformance
from lazyio.fetchers.pread import PreadFetcher


class TestBuffered(FetcherConformance):
    options = FetcherOptions(direct_io="off")

    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        fetcher = PreadFetcher(extents, row_bytes, self.options)
        if self.options.direct_io == "on" and not fetcher.direct_io:
            fetcher.close()
            pytest.skip(str(fetcher.fell_back))
        return fetcher


class TestDirect(TestBuffered):
    options = FetcherOptions(direct_io="on")


class TestFewWorkers(TestBuffered):
    options = FetcherOptions(direct_io="on", workers=2, block_bytes=4096)
