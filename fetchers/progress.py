"""Which windows of a plan have arrived, which must be read on, and which never will."""

from __future__ import annotations

import errno
import os

import numpy as np

from lazyio.errors import ReadError
from lazyio.fetchers.base import Alignment, Int64, ReadPlan
from lazyio.fetchers.files import FileSet

_TRANSIENT = (-errno.EINTR, -errno.EAGAIN, -errno.EBUSY)
_NONE = np.empty(0, np.int64)
MAX_ATTEMPTS = 32


class Progress:
    """Judges the results of positioned reads, in the kernel's convention: bytes read, or a negated errno.

    A window that came short is read on from the last aligned byte, a transient error is repeated, both at most
    MAX_ATTEMPTS times. The first failure is kept in `failure`, so that the caller can wait for what is still in flight
    before it raises.
    """

    def __init__(self, plan: ReadPlan, files: FileSet, alignment: Alignment) -> None:
        self.plan = plan
        self.failure: ReadError | None = None
        self.resumed = 0
        self.bytes_read = 0
        self._files = files
        self._block = alignment.offset
        self._got: Int64 | None = None  # bytes of each window that need not be read again; made when first needed
        self._attempts: dict[int, int] = {}
        self._arrived = np.zeros(len(plan), bool)
        self._landed = 0

    def settle(self, windows: Int64, results: Int64) -> Int64:
        """Take the results of `windows`; return those that must be submitted again, from `rest` on."""
        wanted = self.plan.needed[windows]
        if self._got is not None:
            wanted = wanted - self._got[windows]
        enough = results >= wanted
        if np.count_nonzero(enough) == len(enough):
            self._arrived[windows] = True
            self.bytes_read += int(results.sum())
            return _NONE
        self._arrived[windows[enough]] = True
        self.bytes_read += int(results[results > 0].sum())
        lacking = zip(windows[~enough].tolist(), results[~enough].tolist(), strict=True)
        return np.array([window for window, result in lacking if self._goes_on(window, result)], np.int64)

    def all_arrived(self) -> None:
        """Every window came whole, with one read each."""
        self._arrived[:] = True
        self.bytes_read = self.plan.buffer_bytes

    def rest(self, windows: Int64) -> tuple[Int64, Int64, Int64]:
        """Offset, length and destination of what is still missing of `windows`."""
        done = 0 if self._got is None else self._got[windows]
        return self.plan.offset[windows] + done, self.plan.length[windows] - done, self.plan.dest[windows] + done

    def landed(self) -> int:
        """How many windows, counted from the first, have all arrived."""
        arrived = self._arrived[self._landed :]
        self._landed += len(arrived) if np.count_nonzero(arrived) == len(arrived) else int(arrived.argmin())
        return self._landed

    def _goes_on(self, window: int, result: int) -> bool:
        if self.failure is not None:
            return False
        attempts = self._attempts[window] = self._attempts.get(window, 0) + 1
        if attempts <= MAX_ATTEMPTS and (result in _TRANSIENT or self._advance(window, result)):
            self.resumed += 1
            return True
        self._fail(window, result, attempts)
        return False

    def _advance(self, window: int, result: int) -> bool:
        """Keep the whole blocks of a short read; False where the file ends before the window's bytes do."""
        if result < 0:
            return False
        if self._got is None:
            self._got = np.zeros(len(self.plan), np.int64)
        self._got[window] += result - result % self._block
        file, offset, needed = self._place(window)
        return os.fstat(self._files.descriptors[file]).st_size >= offset + needed

    def _place(self, window: int) -> tuple[int, int, int]:
        return int(self.plan.file[window]), int(self.plan.offset[window]), int(self.plan.needed[window])

    def _fail(self, window: int, result: int, attempts: int) -> None:
        file, offset, needed = self._place(window)
        path = self._files.paths[file]
        where = f"{path} at offset {offset}"
        if result < 0:
            code = -result
            message = f"reading {needed} bytes of {where} failed: {os.strerror(code)} (attempt {attempts})"
            self.failure = ReadError(message, path=path, offset=offset, wanted=needed, got=None, errno=code)
            return
        size = os.fstat(self._files.descriptors[file]).st_size
        got = result if self._got is None else int(self._got[window]) + result % self._block
        why = (
            f"the file ends at {size} now and had {self._files.identities[file].size} bytes when it was opened"
            if size < offset + needed
            else f"the device gave no more in {attempts} attempts"
        )
        message = f"{where}: wanted {needed} bytes and got {got}; {why}"
        self.failure = ReadError(message, path=path, offset=offset, wanted=needed, got=got)
