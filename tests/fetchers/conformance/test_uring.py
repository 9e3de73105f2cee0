from collections.abc import Sequence

import pytest

from lazyio.errors import Unsupported
from lazyio.fetchers import Extent, Fetcher, FetcherOptions
from lazyio.fetchers.conformance import FetcherConformance
from lazyio.fetchers.uring import UringFetcher


class TestBuffered(FetcherConformance):
    options = FetcherOptions(direct_io="off")

    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        try:
            fetcher = UringFetcher(extents, row_bytes, self.options)
        except Unsupported as refused:
            pytest.skip(str(refused))
        if self.options.direct_io == "on" and not fetcher.direct_io:
            fetcher.close()
            pytest.skip(str(fetcher.fell_back))
        return fetcher


class TestDirect(TestBuffered):
    options = FetcherOptions(direct_io="on")


class TestShallow(TestBuffered):
    options = FetcherOptions(direct_io="on", queue_depth=3, block_bytes=4096)
