"""A mapped extent: its rows as an array, and which of its OS pages are known to be in memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.base import Bytes, Extent, Int64

OS_PAGE_BYTES = mmap.PAGESIZE
_PAGE_SHIFT = OS_PAGE_BYTES.bit_length() - 1


class MappedExtent:
    """Rows of one extent through a read-only shared map, `rows` uint8 [rows, row_bytes].

    What has been touched once stays in the page cache as long as the kernel likes, and mostly that is long. `absent`
    tells which rows have not been touched yet, so that only those need advice; `forget` is for when the kernel took
    pages back. Rows as large as an OS page are remembered one by one, smaller ones by their pages.
    """

    def __init__(self, extent: Extent, row_bytes: int, descriptor: int) -> None:
        self.extent = extent
        self._row_bytes = row_bytes
        self._head = extent.offset % mmap.ALLOCATIONGRANULARITY
        length = self._head + extent.rows * row_bytes
        self._map = mmap.mmap(
            descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=extent.offset - self._head
        )
        self._map.madvise(mmap.MADV_RANDOM)
        flat = np.frombuffer(self._map, np.uint8)
        self.address = flat.ctypes.data
        self.rows: Bytes = flat[self._head :].reshape(extent.rows, row_bytes)
        self._by_row = row_bytes >= OS_PAGE_BYTES
        self._touched = np.zeros(extent.rows if self._by_row else -(-length // OS_PAGE_BYTES), bool)

    def absent(self, rows: Int64) -> Int64:
        """Those of `rows` (numbers within the extent) of which an OS page has not been touched yet."""
        first, last = self._marks(rows)
        touched = self._touched[first]
        if last is not None:
            touched &= self._touched[last]
        return rows[:0] if touched.all() else rows[~touched]

    def touch(self, rows: Int64) -> None:
        """Remember that the pages of `rows` are in memory."""
        first, last = self._marks(rows)
        self._touched[first] = True
        if last is not None:
            self._touched[last] = True

    def forget(self) -> None:
        """Remember nothing any more."""
        self._touched[:] = False

    def pages(self, rows: Int64) -> tuple[Int64, Int64]:
        """First and last OS page of each row, counted from the start of the map."""
        start = rows * self._row_bytes + self._head
        return start >> _PAGE_SHIFT, (start + (self._row_bytes - 1)) >> _PAGE_SHIFT

    def ranges(self, rows: Int64) -> tuple[Int64, Int64]:
        """Addresses and lengths of the merged runs of OS pages that hold `rows`, ascending."""
        first, last = self.pages(np.sort(rows))
        apart = np.flatnonzero(first[1:] > last[:-1] + 1)
        starts = first[np.append(0, apart + 1)]
        stops = last[np.append(apart, len(last) - 1)] + 1
        return self.address + (starts << _PAGE_SHIFT), (stops - starts) << _PAGE_SHIFT

    def unmap_pages(self) -> None:
        """Give up the page-table entries; the pages stay in the page cache."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap. No view of `rows` may be in use."""
        del self.rows
        self._map.close()

    def _marks(self, rows: Int64) -> tuple[Int64, Int64 | None]:
        return (rows, None) if self._by_row else self.pages(rows)


_IOVEC = np.dtype([("base", "u8"), ("length", "u8")])


def iovecs(addresses: Int64 | int, lengths: Int64 | int, count: int) -> NDArray[np.void]:
    """An array of struct iovec."""
    vectors = np.empty(count, _IOVEC)
    vectors["base"], vectors["length"] = addresses, lengths
    return vectors


IOV_MAX = 1024


def address_of(array: NDArray[np.void] | Bytes) -> int:
    """Address of the first byte."""
    return cast(int, array.ctypes.data)


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, keeping errno for `ctypes.get_errno`, with the calls that maps need declared."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.syscall.restype = ctypes.c_long
    reader = library.process_vm_readv
    reader.restype = ctypes.c_ssize_t
    reader.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    return library
