"""The ways of a table's rows into memory: copied from where they are addressable, or read by way of staging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.base import Bytes, Fetcher, FetcherOptions, Int64, ReadStats, RowFetcher
from lazyio.fetchers.mapping import MappedRows
from lazyio.gate import TableStats
from lazyio.ple.cache import RowCache
from lazyio.ple.spec import TableSpec
from lazyio.staged import CachedRows, End, Finish, StagedRows, in_chunks
from lazyio.staging import Staging

#: Copies rows ids [n] to out [n, row_bytes].
Take = Callable[[Int64, Bytes], ReadStats]
# The row cache of a table whose reads leave nothing in the page cache.
_CACHE_BYTES = 256 << 20
_NONE = np.empty(0, np.int64)


class Rows(Protocol):
    """One way of rows into memory. Ids are valid; what is done is added to `stats`."""

    def gather(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Fill `rows` [n, row_bytes] with the rows `asked`, n ids of any shape."""
        ...

    def read(self, unique: Int64, rows: Bytes, stats: TableStats) -> None:
        """Fill `rows` [n, row_bytes] with rows `unique` [n], which ascend and do not repeat."""
        ...

    def start(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        """Begin to gather the rows `asked`, as many as a decode step has, and return without waiting for them.

        `asked`, n ids of any shape, stays as it is. What can't begin early is read at the end.
        """
        ...

    def close(self) -> None:
        """Free what this way holds; the fetcher is not its own."""
        ...


def rows_of(
    fetcher: Fetcher,
    spec: TableSpec,
    staging: Staging,
    started: Staging,
    options: FetcherOptions,
    cache_bytes: int | None = 0,
) -> Rows:
    """The way that suits a fetcher, with a row cache of `cache_bytes`; None is one where reads are direct.

    Rows in addressable memory are copied, and need no cache. What a fetcher reads through the page cache is copied from
    a map of that, once it is there, unless a row cache was asked for. All else is read to `staging`, gathers that were
    started to `started`, and taken out of it.
    Raises NeverFits where `cache_bytes` is too little for a cache.
    """
    if isinstance(fetcher, RowFetcher):
        return AddressableRows(fetcher.take, lambda ids: _done(fetcher.expect(ids)))
    staged = StagedRows(fetcher, spec, staging, started)
    if cache_bytes is None:
        cache_bytes = _CACHE_BYTES if fetcher.direct_io else 0
    if cache_bytes:
        return CachedRows(staged, RowCache(spec.rows, spec.row_bytes, cache_bytes))
    if fetcher.direct_io:
        return staged
    try:
        mapped = MappedRows(
            fetcher.files, spec.extents, spec.row_bytes, safe=options.mmap_safe, rss_bytes=options.mmap_rss_bytes
        )
    except OSError:
        return staged  # files that can't be mapped: every gather reads
    return AddressableRows(
        lambda ids, out: mapped.take(ids, out, staged.bring_in), lambda ids: staged.expect(ids, mapped), mapped.close
    )


class AddressableRows:
    """Rows that are copied from memory, without dedup, plan or staging.

    `expect(ids)` begins to bring rows there, and returns what waits for them.
    """

    def __init__(self, take: Take, expect: Callable[[Int64], End], close: Callable[[], None] = lambda: None) -> None:
        self._take, self._expect = take, expect
        self.close = close

    def gather(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Copy; `Rows` has the contract."""
        for start, chunk in in_chunks(asked):
            stats.add(self._take(chunk, rows[start : start + len(chunk)]))

    read = gather

    def start(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        """Begin to bring them in, and copy at the end; `Rows` has the contract."""
        _, ids = next(in_chunks(asked), (0, _NONE))
        end = self._expect(ids)

        def finish(rows: Bytes, stats: TableStats) -> None:
            stats.add(end())
            self.gather(asked, rows, stats)

        return finish


def _done(stats: ReadStats) -> End:
    return lambda: stats
