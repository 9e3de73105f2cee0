"""The whole table in memory: no reads after the first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lazyio.errors import NeverFits
from lazyio.fetchers.base import Bytes, Extent, Fetcher, FetcherOptions, Int64, Landed, ReadPlan, ReadStats
from lazyio.fetchers.direct import open_for_reads
from lazyio.host import available_memory_bytes
from lazyio.units import format_bytes

_CHUNK_BYTES = 16 << 20


class ResidentFetcher(Fetcher):
    """Holds all rows in anonymous memory, one array [rows, row_bytes] in the order of their ids.

    `options.extra` may carry `reserve_bytes`, memory to leave free. Raises NeverFits, before it reads anything, where
    the table is larger than what can be had.
    """

    name: ClassVar[str] = "resident"

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        rows = sum(extent.rows for extent in extents)
        try:
            _refuse_if_too_large(rows * row_bytes, int(options.extra.get("reserve_bytes", 0)))
            self._table = np.empty((rows, row_bytes), np.uint8)
            self._fill()
        except BaseException:
            self.files.close()
            raise

    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        """Copy rows; `TakesRows` has the contract."""
        np.take(self._table, ids, axis=0, out=out, mode="clip")
        return ReadStats()
