"""Which OS pages of a table are in the page cache: counting them with mincore, and dropping them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lazyio.ple.spec import TableSpec

PAGE_BYTES = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

# Mapped and asked about at once: bounds the vector of flags to 256 KiB.
_SLICE_BYTES = 1 << 30
# The page cache of some filesystems holds folios of up to this size, and a folio that is only partly inside the range
# is not dropped. Dropping the neighbours of a table does no harm.
_FOLIO_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class PageRange:
    """Whole OS pages of one file, in bytes: [start, stop)."""

    path: str
    start: int
    stop: int

    @property
    def pages(self) -> int:
        """How many OS pages it holds."""
        return (self.stop - self.start) // PAGE_BYTES


def page_ranges(spec: TableSpec) -> list[PageRange]:
    """The OS pages that hold any byte of the table, each once: ranges rounded outward, sorted, not overlapping."""
    rounded = sorted(
        (
            extent.path,
            extent.offset // PAGE_BYTES * PAGE_BYTES,
            -(-(extent.offset + extent.rows * spec.row_bytes) // PAGE_BYTES) * PAGE_BYTES,
        )
        for extent in spec.extents
        if extent.rows
    )
    merged: list[PageRange] = []
    for path, start, stop in rounded:
        if merged and merged[-1].path == path and start <= merged[-1].stop:
            merged[-1] = PageRange(path, merged[-1].start, max(stop, merged[-1].stop))
        else:
            merged.append(PageRange(path, start, stop))
    return merged


def resident_pages(spec: TableSpec) -> int:
    """Count the table's OS pages that are in memory, with mincore on a fresh read-only map.

    The count means nothing for a file that the caller neither owns nor may write: the kernel then reports every page
    as resident. Raises OSError where a file can't be opened or mapped.
    """
    return sum(resident_in(wanted) for wanted in page_ranges(spec))


def resident_in(wanted: PageRange) -> int:
    """Count the OS pages of one range that are in memory."""
    with opened(wanted.path) as descriptor, _named("mincore", wanted.path):
        end = min(wanted.stop, os.fstat(descriptor).st_size)
        return sum(
            _mincore(descriptor, start, min(_SLICE_BYTES, end - start))
            for start in range(wanted.start, end, _SLICE_BYTES)
        )


def drop_pages(wanted: PageRange) -> None:
    """Write back what is dirty in the file and ask the kernel to drop the range; mapped pages stay."""
    with opened(wanted.path) as descriptor:
        try:
            with _named("fsync", wanted.path):
                os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # nothing there to write back
                raise
        start = wanted.start // _FOLIO_BYTES * _FOLIO_BYTES
        stop = -(-wanted.stop // _FOLIO_BYTES) * _FOLIO_BYTES
        with _named("posix_fadvise", wanted.path):
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A read-only descriptor of the file, closed at the end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(call: str, path: str) -> Iterator[None]:
    """Have an error tell which call failed, and on which file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{call} failed: {error.strerror or error}", path) from error


def _mincore(descriptor: int, start: int, length: int) -> int:
    with mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        flags = np.empty(-(-length // PAGE_BYTES), np.uint8)
        failed = _libc.mincore(view.ctypes.data, length, flags.ctypes.data)
        code = ctypes.get_errno()
        del view  # a map with a live view refuses to close
    if failed:
        raise OSError(code, os.strerror(code))
    return int(np.count_nonzero(flags & 1))
