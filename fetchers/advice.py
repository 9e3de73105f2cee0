"""Telling the kernel which OS pages of our maps are needed next, many ranges in one call."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from lazyio.fetchers.base import Int64
from lazyio.fetchers.mapping import IOV_MAX, address_of, iovecs, libc

_SYS_PROCESS_MADVISE = 440  # the same on every architecture
# What says that the call as such is not to be had, rather than that something is wrong with a range.
_NOT_HERE = (errno.ENOSYS, errno.EPERM, errno.EINVAL)


class Adviser:
    """Starts reads of address ranges of this process without waiting for them.

    `process_madvise` takes 1,024 ranges a call; kernels before 5.10 lack it, and some later ones refuse it on oneself:
    then every range takes a `madvise` of its own, and `fell_back` says so.
    """

    def __init__(self) -> None:
        self.fell_back: str | None = None
        self._libc = libc()
        self._pid = 0
        self._pidfd = -1

    def will_need(self, addresses: Int64, lengths: Int64) -> None:
        """Ask for the pages of these ranges, which are whole OS pages. Advice that fails costs time, never bytes."""
        done = 0
        while done < len(addresses) and self.fell_back is None:
            done += self._advise(addresses[done : done + IOV_MAX], lengths[done : done + IOV_MAX])
        if done < len(addresses):
            for address, length in zip(addresses[done:].tolist(), lengths[done:].tolist(), strict=True):
                self._libc.madvise(address, length, mmap.MADV_WILLNEED)

    def close(self) -> None:
        """Close the descriptor of this process."""
        if self._pid == os.getpid():
            os.close(self._pidfd)
            self._pid = 0

    def _advise(self, addresses: Int64, lengths: Int64) -> int:
        """One call; how many ranges it dealt with, at least one unless the call is not to be had."""
        try:
            descriptor = self._descriptor()
        except OSError as error:
            self._fall_back("pidfd_open", error.errno or 0)
            return 0
        vectors = iovecs(addresses, lengths)
        advised = self._libc.syscall(
            _SYS_PROCESS_MADVISE,
            ctypes.c_int(descriptor),
            ctypes.c_void_p(address_of(vectors)),
            ctypes.c_size_t(len(vectors)),
            ctypes.c_int(mmap.MADV_WILLNEED),
            ctypes.c_uint(0),
        )
        if advised < 0:
            code = ctypes.get_errno()
            if code in _NOT_HERE:
                self._fall_back("process_madvise", code)
                return 0
            return 1  # this range alone is refused: the demand fault will read it
        whole = int((lengths.cumsum() <= advised).sum())
        return max(1, whole)

    def _fall_back(self, call: str, code: int) -> None:
        self.fell_back = f"{call} is refused ({errno.errorcode.get(code, code)}), so that each range takes one madvise"

    def _descriptor(self) -> int:
        """A descriptor of this very process; a child makes its own."""
        if self._pid != os.getpid():
            self._pidfd, self._pid = os.pidfd_open(os.getpid()), os.getpid()
        return self._pidfd
