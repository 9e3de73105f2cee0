"""Every fetcher on a bad device, and our own on a bad kernel, keep the whole contract."""

from collections.abc import Sequence

import pytest

from lazyio.errors import Unsupported
from lazyio.fetchers import Extent, Fetcher, FetcherOptions, load
from lazyio.fetchers.conformance import FetcherConformance
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.fetchers.faulty_kernel import with_faulty_kernel

FAULTS = Faults.everywhere(0.1, delay_s=0.0001)


class TestUring(FetcherConformance):
    name = "uring"
    options = FetcherOptions(direct_io="on")

    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        try:
            fetcher = load(self.name)(extents, row_bytes, self.options)
        except Unsupported as refused:
            pytest.skip(str(refused))
        return self.wrap(fetcher)

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return with_faults(fetcher, FAULTS)


class TestPread(TestUring):
    name = "pread"
    options = FetcherOptions(direct_io="off")


class TestMmap(TestUring):
    name = "mmap"


class TestResident(TestUring):
    name = "resident"


class TestUringOnABadKernel(TestUring):
    def wrap(self, fetcher: Fetcher) -> Fetcher:
        return with_faulty_kernel(fetcher, FAULTS)


class TestBufferedUringOnABadKernel(TestUringOnABadKernel):
    options = FetcherOptions(direct_io="off", queue_depth=7)


class TestPreadOnABadKernel(TestUringOnABadKernel):
    name = "pread"


class TestBufferedPreadOnABadKernel(TestPreadOnABadKernel):
    options = FetcherOptions(direct_io="off")
