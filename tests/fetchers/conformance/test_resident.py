from collections.abc import Sequence

from lazyio.fetchers import Extent, Fetcher, FetcherOptions
from lazyio.fetchers.conformance import FetcherConformance
from lazyio.fetchers.resident import ResidentFetcher


class TestResident(FetcherConformance):
    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        return ResidentFetcher(extents, row_bytes, FetcherOptions())
