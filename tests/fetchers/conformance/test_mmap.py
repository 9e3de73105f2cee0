from collections.abc import Sequence

from lazyio.fetchers import Extent, Fetcher, FetcherOptions
from lazyio.fetchers.conformance import FetcherConformance
from lazyio.fetchers.mmap import MmapFetcher


class TestMmap(FetcherConformance):
    options = FetcherOptions()

    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        return MmapFetcher(extents, row_bytes, self.options)


class TestBare(TestMmap):
    options = FetcherOptions(advice=False)


class TestSafe(TestMmap):
    options = FetcherOptions(mmap_safe=True)


class TestTrimmed(TestMmap):
    options = FetcherOptions(mmap_rss_bytes=1)
