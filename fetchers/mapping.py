"""Rows through read-only maps of their files, and which of their OS pages are known to be in memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import resource
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import ReadError, Unsupported
from lazyio.fetchers.base import Bytes, Extent, Int64, ReadStats
from lazyio.fetchers.files import FileSet
from lazyio.host import owns_or_writes

OS_PAGE_BYTES = mmap.PAGESIZE
_PAGE_SHIFT = OS_PAGE_BYTES.bit_length() - 1
IOV_MAX = 1024
_IOVEC = np.dtype([("base", "u8"), ("length", "u8")])

# One major fault in so many rows is tolerated before the memory of what was touched is given up: bringing in what is
# there already costs far less than a fault, but not nothing.
_ROWS_PER_TOLERATED_FAULT = 128
# Of so many rows and more, one in so many is looked at where nothing is expected to be absent.
_SAMPLED_FROM_ROWS = 4096
_SAMPLED = 16
# Of so many untouched rows and more, so many are looked for in the page cache before they are brought in.
_CACHED_FROM_ROWS = 1024
_CACHED_SAMPLE = 128
# Rows copied at once where they go through a temporary array.
_COPY_ROWS = 2048

#: Starts or makes the reads of the OS pages of these rows, and says what it did.
BringIn = Callable[[Int64], ReadStats]


class MappedRows:
    """The rows of all extents, through one map an extent.

    What has been touched once stays in the page cache for as long as the kernel likes, and mostly that is long: it is
    remembered, so that only the rest need be brought in before it is copied. Rows as large as an OS page are remembered
    one by one, smaller ones by their pages. Major faults show when the kernel has taken pages back; then all is
    forgotten.
    """

    def __init__(
        self, files: FileSet, extents: Sequence[Extent], row_bytes: int, *, safe: bool, rss_bytes: int
    ) -> None:
        self._files = files
        self._extents = extents
        self._row_bytes = row_bytes
        self._safe = safe
        self._rss_bytes = rss_bytes
        self._maps: list[mmap.mmap] = []
        self._first = np.array([extent.first_row for extent in extents], np.int64)
        self._file = np.array([files.index[extent.path] for extent in extents], np.int32)
        # Rows have a place in one imaginary run of all maps, with an unused OS page between any two:
        # place = id * row_bytes + place_shift[extent], address = place + address_shift[extent].
        self._place_shift = np.zeros(len(extents), np.int64)
        self._address_shift = np.zeros(len(extents), np.int64)
        pages = 0
        if safe:
            _probe_safe_copy()
        try:
            for number, extent in enumerate(extents):
                pages += self._map(number, extent, pages) + 1
        except BaseException:
            self.close()
            raise
        # To those who may not, the kernel says that every page is there.
        self._mincore_tells = all(owns_or_writes(descriptor) for descriptor in files.descriptors)
        self._settled = False  # whether the last look at a whole gather found nothing absent
        # The rows of a table of one extent, as an array.
        self._rows: Bytes | None = None
        if len(extents) == 1:
            head = extents[0].offset % mmap.ALLOCATIONGRANULARITY
            self._rows = np.frombuffer(self._maps[0], np.uint8)[head:].reshape(-1, row_bytes)
        self._by_row = row_bytes >= OS_PAGE_BYTES
        self._touched = np.zeros(sum(extent.rows for extent in extents) if self._by_row else pages, bool)

    def take(self, ids: Int64, out: Bytes, bring_in: BringIn | None) -> ReadStats:
        """Copy rows `ids` [n] to `out` [n, row_bytes], having brought in those that have not been touched.

        Raises ReadError where a file was truncated or rewritten since it was opened.
        """
        if not len(ids):
            return ReadStats()
        extent = self._extent(ids)
        for file in (0,) if len(self._files.paths) == 1 else np.flatnonzero(np.bincount(self._file[extent])).tolist():
            self._files.check(file)
        stats = ReadStats() if bring_in is None else self.expect(ids, bring_in)
        before = _major_faults()
        self._copy(ids, extent, out)
        faults = _major_faults() - before
        if faults:
            stats.reads += faults
            stats.bytes_read += faults * OS_PAGE_BYTES
            if faults > len(ids) // _ROWS_PER_TOLERATED_FAULT:
                self._touched[:] = False
        if self._rss_bytes:
            self._trim()
        return stats

    def expect(self, ids: Int64, bring_in: BringIn) -> ReadStats:
        """Have those of rows `ids` [n] brought in that have not been touched."""
        stats = ReadStats()
        absent = self._to_bring_in(ids)
        if len(absent):
            if not self._seem_cached(absent):
                stats = bring_in(absent)
            self._touch(absent)
        return stats

    def _to_bring_in(self, ids: Int64) -> Int64:
        """The absent rows; none if the last look found none and a sample of these has none either.

        Looking at all costs a fifth of copying them. A few that a sample misses are read by demand faults.
        """
        if self._settled and len(ids) >= _SAMPLED_FROM_ROWS and not len(self.absent(ids[::_SAMPLED])):
            return ids[:0]
        absent = self.absent(ids)
        self._settled = not len(absent)
        return absent

    def _seem_cached(self, absent: Int64) -> bool:
        """Whether a sample of rows that were not touched yet is in the page cache all the same, put there by others."""
        if len(absent) < _CACHED_FROM_ROWS or not self._mincore_tells:
            return False
        sample = absent[:: len(absent) // _CACHED_SAMPLE]
        first, _ = self._pages(sample)
        addresses = (first << _PAGE_SHIFT) + self._address_shift[self._extent(sample)]
        present = ctypes.c_ubyte()
        for address in addresses.tolist():
            if libc().mincore(address, OS_PAGE_BYTES, ctypes.byref(present)) or not present.value & 1:
                return False
        return True

    def absent(self, ids: Int64) -> Int64:
        """Those of `ids` of which an OS page has not been touched yet."""
        if self._by_row:
            touched = self._touched[ids]
        else:
            first, last = self._pages(ids)
            touched = self._touched.take(first, mode="clip")
            touched &= self._touched.take(last, mode="clip")
        return ids[:0] if touched.all() else ids[~touched]

    def ranges(self, ids: Int64) -> tuple[Int64, Int64]:
        """Addresses and lengths of the merged runs of OS pages that hold rows `ids`, ascending in each extent."""
        ids = np.sort(ids)
        first, last = self._pages(ids)
        apart = np.flatnonzero(first[1:] > last[:-1] + 1)
        heads = np.append(0, apart + 1)
        starts = first[heads]
        stops = last[np.append(apart, len(ids) - 1)] + 1
        addresses = (starts << _PAGE_SHIFT) + self._address_shift[self._extent(ids[heads])]
        return addresses, (stops - starts) << _PAGE_SHIFT

    def close(self) -> None:
        """Unmap everything; what an interrupted gather still refers to goes with its traceback."""
        self._rows = None
        while self._maps:
            with contextlib.suppress(BufferError):
                self._maps.pop().close()

    def _map(self, number: int, extent: Extent, pages_before: int) -> int:
        """Map one extent; return how many OS pages the map has."""
        head = extent.offset % mmap.ALLOCATIONGRANULARITY
        length = head + extent.rows * self._row_bytes
        descriptor = self._files.descriptors[self._file[number]]
        made = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=extent.offset - head)
        self._maps.append(made)
        made.madvise(mmap.MADV_RANDOM)
        place = pages_before << _PAGE_SHIFT
        self._place_shift[number] = place + head - extent.first_row * self._row_bytes
        self._address_shift[number] = np.frombuffer(made, np.uint8).ctypes.data - place
        return -(-length // OS_PAGE_BYTES)

    def _extent(self, ids: Int64) -> Int64 | int:
        return 0 if len(self._first) == 1 else np.searchsorted(self._first, ids, side="right") - 1

    def _pages(self, ids: Int64) -> tuple[Int64, Int64]:
        """First and last OS page of each row, counted through all maps."""
        last = ids * self._row_bytes
        last += self._place_shift[self._extent(ids)]
        first = last >> _PAGE_SHIFT
        last += self._row_bytes - 1
        last >>= _PAGE_SHIFT
        return first, last

    def _touch(self, ids: Int64) -> None:
        if self._by_row:
            self._touched[ids] = True
        else:
            first, last = self._pages(ids)
            self._touched[first] = True
            self._touched[last] = True

    def _copy(self, ids: Int64, extent: Int64 | int, out: Bytes) -> None:
        if self._rows is not None and not self._safe:
            np.take(self._rows, ids, axis=0, out=out, mode="clip")
            return
        shift = self._place_shift + self._address_shift
        address = ids * self._row_bytes + shift[extent]
        if self._safe:
            self._copy_safely(ids, address, out)
        else:
            self._copy_anywhere(address, out)

    def _copy_anywhere(self, address: Int64, out: Bytes) -> None:
        """Copy rows from several maps: one array, as long as the maps are apart, with a row at every byte."""
        row = np.dtype((np.void, self._row_bytes))
        base, span = int(address.min()), int(np.ptp(address))
        memory = (ctypes.c_char * (span + self._row_bytes)).from_address(base)
        anywhere = np.ndarray((span + 1,), row, memoryview(memory), strides=(1,))
        target = out.reshape(-1).view(row)
        for start in range(0, len(address), _COPY_ROWS):
            part = slice(start, start + _COPY_ROWS)
            target[part] = anywhere[address[part] - base]

    def _copy_safely(self, ids: Int64, address: Int64, out: Bytes) -> None:
        """Let the kernel copy: where the file has lost its end, it answers EFAULT instead of killing the process.

        Raises ReadError.
        """
        for start in range(0, len(address), IOV_MAX):
            part = address[start : start + IOV_MAX]
            remote = iovecs(part, self._row_bytes)
            local = iovecs(np.array([address_of(out[start:])]), len(part) * self._row_bytes)
            copied = _copy_in_kernel(local, remote)
            if copied != len(part) * self._row_bytes:
                raise self._failed(int(ids[start + max(0, copied) // self._row_bytes]), -min(0, copied))

    def _failed(self, row: int, code: int) -> ReadError:
        """The error of a row that was not copied; `code` is an errno, or 0 where the copy ended before it."""
        extent = self._extents[int(np.searchsorted(self._first, row, side="right")) - 1]
        offset = extent.offset + (row - extent.first_row) * self._row_bytes
        lost = code in (0, errno.EFAULT)
        what = (
            "can't be read any more; the file was truncated or its device failed"
            if lost
            else f"can't be copied: process_vm_readv failed: {os.strerror(code)}"
        )
        return ReadError(
            f"{extent.path} at offset {offset}: row {row} {what}",
            path=extent.path,
            offset=offset,
            wanted=self._row_bytes,
            got=0 if lost else None,
            errno=None if lost else code,
        )

    def _trim(self) -> None:
        """Give page-table entries back beyond the limit; the pages stay in the page cache."""
        if _mapped_resident_bytes() > self._rss_bytes:
            for made in self._maps:
                made.madvise(mmap.MADV_DONTNEED)


def _probe_safe_copy() -> None:
    """Raise Unsupported where the kernel does not copy from this process to itself."""
    byte = np.zeros(1, np.uint8)
    itself = iovecs(np.array([address_of(byte)]), 1)
    code = -_copy_in_kernel(itself, itself)
    if code <= 0:
        return
    cause = (
        f"this kernel ({os.uname().release}) has none"
        if code == errno.ENOSYS
        else "a seccomp profile forbids it; allow process_vm_readv"
    )
    raise Unsupported(
        f"mmap_safe copies rows with process_vm_readv, which is refused ({errno.errorcode.get(code, code)}): {cause}, "
        "or leave mmap_safe out; direct reads (mode uring or on-direct with direct_io on) make no map and need neither"
    )


def _copy_in_kernel(local: NDArray[np.void], remote: NDArray[np.void]) -> int:
    """Copy `remote` to `local` within this process; return the bytes copied, or the negated errno."""
    copied: int = libc().process_vm_readv(
        os.getpid(), address_of(local), len(local), address_of(remote), len(remote), 0
    )
    return copied if copied >= 0 else -ctypes.get_errno()


def iovecs(addresses: Int64, lengths: Int64 | int) -> NDArray[np.void]:
    """An array of struct iovec."""
    vectors = np.empty(len(addresses), _IOVEC)
    vectors["base"], vectors["length"] = addresses, lengths
    return vectors


def address_of(array: NDArray[np.void] | Bytes) -> int:
    """Address of the first byte."""
    return array.ctypes.data


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, keeping errno for `ctypes.get_errno`, with the calls that maps need declared."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    library.syscall.restype = ctypes.c_long
    reader = library.process_vm_readv
    reader.restype = ctypes.c_ssize_t
    reader.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    return library


def _major_faults() -> int:
    """Faults of this thread that had to wait for the device."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _mapped_resident_bytes() -> int:
    """Pages of files that this process has mapped and in memory, shared memory included (proc_pid_statm(5))."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[2]) * OS_PAGE_BYTES
