"""Rows through a map of the file: with the page cache's help, and no read calls for what is warm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lazyio.fetchers.advice import Adviser
from lazyio.fetchers.base import Bytes, Extent, FetcherOptions, Int64, ReadStats, RowFetcher
from lazyio.fetchers.mapping import MappedRows


class MmapFetcher(RowFetcher):
    """Copies rows out of read-only maps.

    The OS pages of a gather that have not been touched yet are first asked for in batches, so that the device works on
    all of them at once. With `options.advice` off, the bare way: each page is read when a copy faults on it, one after
    the other.
    """

    name: ClassVar[str] = "mmap"

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        try:
            self._rows = MappedRows(
                self.files, self.extents, row_bytes, safe=options.mmap_safe, rss_bytes=options.mmap_rss_bytes
            )
        except BaseException:
            self.files.close()
            raise
        self._adviser = Adviser() if options.advice else None
        if self._adviser is not None:
            self._adviser.will_need(*self._rows.ranges(np.zeros(1, np.int64)))
            self.fell_back = self._adviser.fell_back

    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        """Copy rows; the base class has the contract. Raises ReadError if a file was truncated or rewritten."""
        return self._rows.take(ids, out, self._advise if self._adviser is not None else None)

    def expect(self, ids: Int64) -> ReadStats:
        """Ask for the OS pages of rows; the base class has the contract."""
        return ReadStats() if self._adviser is None else self._rows.expect(ids, self._advise)

    def close(self) -> None:
        """Unmap everything."""
        self._rows.close()
        if self._adviser is not None:
            self._adviser.close()
        super().close()

    def _advise(self, absent: Int64) -> ReadStats:
        assert self._adviser is not None
        addresses, lengths = self._rows.ranges(absent)
        self._adviser.will_need(addresses, lengths)
        return ReadStats(reads=len(addresses), bytes_read=int(lengths.sum()))
