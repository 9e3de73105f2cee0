"""Opening files for positioned reads, through the page cache or past it (O_DIRECT)."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
from dataclasses import dataclass

from lazyio.errors import ReadError, SettingError
from lazyio.fetchers.base import Alignment
from lazyio.fetchers.files import Descriptors, FileSet
from lazyio.host import direct_alignment, filesystem_of

CHOICES = ("auto", "on", "off")

# From this row size on, a row spans whole OS pages: the page cache reads hardly more than was asked, and may keep it.
BUFFERED_FROM_ROW_BYTES = 4096

# They accept O_DIRECT and go through the page cache all the same, because it is where their files live.
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class Opened:
    """Descriptors of a table's files, one a file in the order of its FileSet.

    `reason` says why reads are buffered although direct I/O was wanted; None where nothing was denied.
    """

    descriptors: Descriptors
    direct: bool
    alignment: Alignment
    reason: str | None = None

    def close(self) -> None:
        """Close the descriptors; harmless when done twice."""
        self.descriptors.close()


def open_for_reads(files: FileSet, choice: str, row_bytes: int, block_bytes: int) -> Opened:
    """Open every file of `files` once more, all directly or all buffered.

    `choice` "off" gives buffered reads, "on" direct ones, "auto" direct ones for rows smaller than an OS page. Where
    direct I/O can't be had, reads are buffered and `reason` is set. `block_bytes` is the least length of a direct read,
    a power of two; 0 leaves it to the files. The alignment is that of the most demanding file.
    Raises SettingError for a malformed choice or block, ReadError if a file was replaced meanwhile.
    """
    if choice not in CHOICES:
        raise SettingError(f"direct I/O is set to {choice!r}; it can be {', '.join(CHOICES)}")
    if block_bytes < 0 or block_bytes & (block_bytes - 1):
        raise SettingError(f"the block of direct reads is set to {block_bytes} bytes; it must be a power of two, or 0")
    if choice == "off" or (choice == "auto" and row_bytes >= BUFFERED_FROM_ROW_BYTES):
        return _buffered(files, None)
    descriptors = Descriptors()
    alignments: list[Alignment] = []
    try:
        for number in range(len(files.paths)):
            descriptor, alignment = _open_direct(files, number)
            descriptors.append(descriptor)
            alignments.append(alignment)
    except _RefusedError as refused:
        descriptors.close()
        return _buffered(files, str(refused))
    except BaseException:
        descriptors.close()
        raise
    offset = math.lcm(*(alignment.offset for alignment in alignments))
    memory = math.lcm(*(alignment.memory for alignment in alignments))
    return Opened(descriptors, True, Alignment(max(offset, block_bytes), memory))


class _RefusedError(Exception):
    """One file can't be read directly; the message is for the user."""


def _buffered(files: FileSet, reason: str | None) -> Opened:
    descriptors = Descriptors()
    try:
        for descriptor in files.descriptors:
            descriptors.append(os.dup(descriptor))
            # Rows are scattered: what readahead would fetch beside them is never used.
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptors[-1], 0, 0, os.POSIX_FADV_RANDOM)
    except BaseException:
        descriptors.close()
        raise
    return Opened(descriptors, False, Alignment(), reason)


def _open_direct(files: FileSet, number: int) -> tuple[int, Alignment]:
    path = files.paths[number]
    kind = filesystem_of(path).kind
    if kind in _IN_MEMORY:
        raise _RefusedError(f"{path} lies on {kind}, which is memory: there is nothing to read directly")
    try:
        descriptor = files.reopen(number, os.O_RDONLY | os.O_DIRECT)
    except ReadError:
        raise
    except OSError as error:
        raise _RefusedError(f"{kind} refused to open {path} for direct I/O ({_name(error)})") from error
    alignment = direct_alignment(descriptor)
    if alignment is None:
        os.close(descriptor)
        raise _RefusedError(f"{kind} has no direct I/O for {path}")
    try:
        _probe(descriptor, alignment)
    except OSError as error:
        os.close(descriptor)
        raise _RefusedError(f"{kind} opened {path} for direct I/O but refused to read it ({_name(error)})") from error
    return descriptor, alignment


def _probe(descriptor: int, alignment: Alignment) -> None:
    """Read one block at an offset and an address that are aligned as asked and no better."""
    offset = alignment.offset if os.fstat(descriptor).st_size > alignment.offset else 0
    start = alignment.memory
    area = memoryview(mmap.mmap(-1, start + alignment.offset))
    os.preadv(descriptor, [area[start:]], offset)


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))
