"""Rows through a map of the file: with the page cache's help, and no read calls for what is warm."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from lazyio.errors import ReadError
from lazyio.fetchers.advice import Adviser
from lazyio.fetchers.base import Bytes, Extent, FetcherOptions, Int64, ReadStats, RowFetcher
from lazyio.fetchers.mapping import IOV_MAX, OS_PAGE_BYTES, MappedExtent, address_of, iovecs, libc

# One major fault in so many rows is tolerated before the memory of what was touched is given up: advice for rows that
# are there costs far less than a fault, but not nothing.
_ROWS_PER_TOLERATED_FAULT = 128


class MmapFetcher(RowFetcher):
    """Copies rows out of read-only maps.

    The OS pages of a gather that have not been touched yet are first asked for in batches, so that the device works on
    all of them at once. With `options.advice` off, the bare way: each page is read when a copy faults on it, one after
    the other.
    """

    name: ClassVar[str] = "mmap"

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self._maps: list[MappedExtent] = []
        self._adviser = Adviser() if options.advice else None
        self._first = np.array([extent.first_row for extent in self.extents], np.int64)
        try:
            for extent in self.extents:
                descriptor = self.files.descriptors[self.files.index[extent.path]]
                self._maps.append(MappedExtent(extent, row_bytes, descriptor))
        except BaseException:
            self.close()
            raise
        if self._adviser is not None:
            self._adviser.probe(self._maps[0].address, OS_PAGE_BYTES)
            self.fell_back = self._adviser.fell_back

    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        """Copy rows; the base class has the contract. Raises ReadError if a file was truncated or rewritten."""
        parts = list(self._by_extent(ids))
        for mapped, _, _ in parts:
            self.files.check(self.files.index[mapped.extent.path])
        stats = ReadStats()
        if self._adviser is not None:
            for mapped, rows, _ in parts:
                self._advise(mapped, rows, stats)
        faults = _major_faults()
        for mapped, rows, where in parts:
            self._copy(mapped, rows, out, where)
        faults = _major_faults() - faults
        stats.reads += faults
        stats.bytes_read += faults * OS_PAGE_BYTES
        if self._adviser is not None and faults > len(ids) // _ROWS_PER_TOLERATED_FAULT:
            for mapped in self._maps:
                mapped.forget()
        self._trim()
        return stats

    def close(self) -> None:
        """Unmap everything."""
        while self._maps:
            self._maps.pop().close()
        if self._adviser is not None:
            self._adviser.close()
        super().close()

    def _by_extent(self, ids: Int64) -> Iterator[tuple[MappedExtent, Int64, Int64 | None]]:
        """Each extent that holds some of `ids`: its rows, and where in `ids` they stand (None for all)."""
        if len(self._maps) == 1:
            yield self._maps[0], ids, None
            return
        extent = np.searchsorted(self._first, ids, side="right") - 1
        order = extent.argsort(kind="stable")
        numbers, starts = np.unique(extent[order], return_index=True)
        stops = np.append(starts[1:], len(ids))
        for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
            where = order[start:stop]
            yield self._maps[number], ids[where] - self._first[number], where

    def _advise(self, mapped: MappedExtent, rows: Int64, stats: ReadStats) -> None:
        absent = mapped.absent(rows)
        if not len(absent) or self._adviser is None:
            return
        addresses, lengths = mapped.ranges(absent)
        self._adviser.will_need(addresses, lengths)
        mapped.touch(absent)
        stats.reads += len(addresses)
        stats.bytes_read += int(lengths.sum())

    def _copy(self, mapped: MappedExtent, rows: Int64, out: Bytes, where: Int64 | None) -> None:
        target = out if where is None else np.empty((len(rows), self.row_bytes), np.uint8)
        if self.options.mmap_safe:
            self._copy_safely(mapped, rows, target)
        else:
            np.take(mapped.rows, rows, axis=0, out=target, mode="clip")
        if where is not None:
            out[where] = target

    def _copy_safely(self, mapped: MappedExtent, rows: Int64, out: Bytes) -> None:
        """Let the kernel copy: where the file has lost its end, it answers EFAULT instead of killing the process."""
        kernel = libc()
        base = address_of(mapped.rows)
        for start in range(0, len(rows), IOV_MAX):
            part = rows[start : start + IOV_MAX]
            remote = iovecs(part * self.row_bytes + base, self.row_bytes, len(part))
            local = iovecs(address_of(out[start:]), len(part) * self.row_bytes, 1)
            copied = kernel.process_vm_readv(os.getpid(), address_of(local), 1, address_of(remote), len(part), 0)
            if copied != len(part) * self.row_bytes:
                self._lost(mapped, int(part[max(0, copied) // self.row_bytes]))

    def _lost(self, mapped: MappedExtent, row: int) -> None:
        extent = mapped.extent
        offset = extent.offset + row * self.row_bytes
        raise ReadError(
            f"{extent.path} at offset {offset}: row {extent.first_row + row} can't be read any more; the file was "
            "truncated or its device failed",
            path=extent.path,
            offset=offset,
            wanted=self.row_bytes,
            got=0,
        )

    def _trim(self) -> None:
        limit = self.options.mmap_rss_bytes
        if limit and _mapped_resident_bytes() > limit:
            for mapped in self._maps:
                mapped.unmap_pages()


def _major_faults() -> int:
    """Faults of this thread that had to wait for the device."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _mapped_resident_bytes() -> int:
    """Pages of files that this process has mapped and in memory, shared memory included (proc_pid_statm(5))."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[2]) * OS_PAGE_BYTES
