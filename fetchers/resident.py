"""The whole table in memory: read once, when it is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np

from lazyio.errors import NeverFits, ReadError
from lazyio.fetchers.base import Bytes, Extent, FetcherOptions, Int64, ReadStats, RowFetcher
from lazyio.host import available_memory_bytes
from lazyio.units import format_bytes

_CHUNK_BYTES = 16 << 20
# The page cache holds folios of up to this size, and one that is only partly inside a range is not dropped with it.
_FOLIO_BYTES = 2 << 20


class ResidentFetcher(RowFetcher):
    """Holds all rows in anonymous memory, one array [rows, row_bytes] in the order of their ids.

    Raises NeverFits before it reads anything where the table and `options.reserve_bytes` are more than memory has.
    """

    name: ClassVar[str] = "resident"

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        rows = sum(extent.rows for extent in extents)
        try:
            _refuse_if_too_large(rows * row_bytes, options.reserve_bytes)
            self._table = np.empty((rows, row_bytes), np.uint8)
            for extent in self.extents:
                self._load(extent)
        except BaseException:
            self.files.close()
            raise

    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        """Copy rows; the base class has the contract."""
        np.take(self._table, ids, axis=0, out=out, mode="clip")
        return ReadStats()

    def _load(self, extent: Extent) -> None:
        """Read one extent from start to end, leaving nothing of it in the page cache."""
        descriptor = self.files.descriptors[self.files.index[extent.path]]
        rows = self._table[extent.first_row : extent.first_row + extent.rows]
        target = rows.reshape(-1)
        done = 0
        while done < len(target):
            at = extent.offset + done
            chunk = target[done : done + _CHUNK_BYTES]
            got = os.preadv(descriptor, [memoryview(cast(Any, chunk))], at)
            start = at // _FOLIO_BYTES * _FOLIO_BYTES
            stop = -(-(at + got) // _FOLIO_BYTES) * _FOLIO_BYTES
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
            if got == 0:
                raise ReadError(
                    f"{extent.path} ends at {at}, {len(target) - done} bytes before the end of the table",
                    path=extent.path,
                    offset=at,
                    wanted=len(chunk),
                    got=0,
                )
            done += got


def _refuse_if_too_large(table_bytes: int, reserve_bytes: int) -> None:
    available = available_memory_bytes()
    if table_bytes + reserve_bytes > available:
        raise NeverFits(
            f"the table takes {format_bytes(table_bytes)} of memory and {format_bytes(reserve_bytes)} must stay free, "
            f"but {format_bytes(available)} can be had: use mode uring, on-direct or on, or lower reserve"
        )
