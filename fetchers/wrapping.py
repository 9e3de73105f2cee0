"""What wrappers around fetchers share: to their user they look like what they wrap."""

from __future__ import annotations

from lazyio.fetchers.base import Fetcher


def take_after(wrapper: Fetcher, inner: Fetcher) -> None:
    """Give `wrapper` the attributes of `inner`, in place of those that opening files would give it."""
    wrapper.extents, wrapper.row_bytes, wrapper.options = inner.extents, inner.row_bytes, inner.options
    wrapper.files, wrapper.alignment, wrapper.direct_io = inner.files, inner.alignment, inner.direct_io
    wrapper.queue_depth, wrapper.workers, wrapper.fell_back = inner.queue_depth, inner.workers, inner.fell_back
