"""Linux native AIO as numpy arrays: reads that go on by themselves.

io_submit(2) queues reads past the page cache at the device and returns, so that one thread keeps as many in flight as
it likes. Reads through the page cache it carries out inside the call: they gain nothing by it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Generator

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import Unsupported
from lazyio.fetchers.base import Int64, ReadStats

# io_setup, io_destroy, io_submit, io_getevents, from the kernel's tables of system calls.
_X86_64 = (206, 207, 209, 208)
_GENERIC = (0, 1, 2, 4)
_CALLS = {"x86_64": _X86_64, "AMD64": _X86_64, "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC}

# struct iocb and struct io_event of include/uapi/linux/aio_abi.h, little-endian.
_IOCB = np.dtype(
    [
        ("data", "u8"),
        ("key", "u4"),
        ("rw_flags", "u4"),
        ("opcode", "u2"),
        ("priority", "i2"),
        ("fd", "u4"),
        ("buffer", "u8"),
        ("length", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("flags", "u4"),
        ("eventfd", "u4"),
    ]
)
_EVENT = np.dtype([("data", "u8"), ("iocb", "u8"), ("result", "i8"), ("result2", "i8")])
_OP_PREAD = 0

# Reads of one call. From three on the kernel holds them back until it has seen the last: the device then gets them all
# at one time, answers at one time, and has nothing to do until it gets the next.
_AT_ONCE = 2
_TOLD = 512  # completions that are handed on together
_TRIES = 8
_NONE = np.empty(0, np.int64)


class Requests:
    """Positioned reads as the kernel wants them: arrays [n] of numbers to know them by, of descriptors, of offsets and
    lengths in bytes, and of the addresses that the bytes go to. `memory` is what lies there: it is kept from being
    freed.
    """

    def __init__(
        self,
        numbers: Int64,
        descriptor: NDArray[np.int32],
        offset: Int64,
        length: Int64,
        address: Int64,
        memory: object = None,
    ) -> None:
        self._memory = memory
        self._iocbs = np.zeros(len(numbers), _IOCB)
        self._iocbs["data"] = numbers
        self._iocbs["opcode"] = _OP_PREAD
        self._iocbs["fd"] = descriptor
        self._iocbs["buffer"] = address
        self._iocbs["length"] = length
        self._iocbs["offset"] = offset
        self._pointers = self._iocbs.ctypes.data + np.arange(len(numbers), dtype=np.int64) * _IOCB.itemsize
        self._address = self._pointers.ctypes.data

    def __len__(self) -> int:
        return len(self._pointers)

    def list_from(self, first: int) -> int:
        """Address of the kernel's list of reads, from the `first` of them on."""
        return self._address + first * self._pointers.itemsize

    def number(self, read: int) -> int:
        """What read `read` is known by."""
        return int(self._iocbs["data"][read])


class Context:
    """A queue of native AIO, used by one thread at a time, in the process that made it.

    `entries` is the most reads in flight. Nothing is in flight outside of an iteration of `flow`, and while there is
    one the context is `busy` and has no other.
    Raises Unsupported where the kernel gives no queue.
    """

    _handle = 0  # of the class, for one that an interrupt left half made

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.busy = False
        self._pid = os.getpid()
        self._setup, self._destroy, self._submit, self._getevents = _calls()
        handle = ctypes.c_ulong(0)
        refused = -_call(self._setup, entries, ctypes.addressof(handle))
        if refused > 0:
            raise Unsupported(_why_refused(refused))
        self._handle = handle.value
        self._events = np.zeros(entries + _TOLD, _EVENT)
        self._events_address = self._events.ctypes.data

    def __del__(self) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether this process may still submit to it."""
        return bool(self._handle) and self._pid == os.getpid()

    def flow(self, requests: Requests, depth: int, stats: ReadStats) -> Generator[tuple[Int64, Int64], None, None]:
        """Carry `requests` out with at most `depth` in flight; yield numbers and results of those that are done.

        The first time there are none: the first reads were started, and the caller may have something else to do.
        Results are in the kernel's convention: bytes read, or a negated errno. `stats.service_s` grows by the reads in
        flight integrated over time; what has ended counts until it is looked for. An iteration that is given up,
        closed or interrupted waits for what is in flight, and the context can't be used again.
        """
        taken = in_flight = filled = 0
        depth = min(depth, self.entries)
        unfinished = True  # not told by in_flight: an interrupt may come between a call and its count
        self.busy, told = True, False
        since = time.perf_counter()
        try:
            while True:
                while taken < len(requests) and in_flight < depth and filled < _TOLD:
                    most = min(len(requests) - taken, depth - in_flight)
                    started, refused = self._start(requests, taken, most, filled)
                    taken, in_flight, filled = taken + started + refused, in_flight + started, filled + refused
                if not told:
                    told = True
                    yield _NONE, _NONE
                ended = taken == len(requests)
                if filled >= _TOLD or (ended and not in_flight):
                    done, filled = self._events[:filled], 0
                    yield done["data"].astype(np.int64), done["result"].copy()
                if in_flight:
                    count = self._collect(in_flight if ended else max(1, in_flight // 8), in_flight, filled)
                    now = time.perf_counter()
                    stats.service_s += (now - since) * in_flight
                    since, in_flight, filled = now, in_flight - count, filled + count
                elif ended:
                    unfinished = False
                    return
        finally:
            if unfinished:
                self.close()
            self.busy = False

    def goes_on_by_itself(self, requests: Requests) -> bool:
        """Whether a submitted read is carried out beside its submitter, tried on the first of `requests`.

        False where it is carried out while it is submitted, as by filesystems without asynchronous direct I/O. A read
        may also have ended before it is looked for, so it takes several to be sure of that. Raises Unsupported where a
        call is refused, and the context can't be used again.
        """
        try:
            return any(self._is_under_way(requests) for _ in range(_TRIES))
        except OSError as error:
            self.close()
            raise Unsupported(_why_refused(error.errno or 0)) from error

    def _is_under_way(self, requests: Requests) -> bool:
        """Whether the first of `requests` has not ended yet when its submission has; waits for it."""
        started = _call(self._submit, self._handle, 1, requests.list_from(0))
        if started in (-errno.EPERM, -errno.ENOSYS):
            raise OSError(-started, f"io_submit failed: {os.strerror(-started)}")
        if started != 1:
            return False
        under_way = not self._collect(0, 1, 0)
        if under_way:
            while not self._collect(1, 1, 0):
                pass  # a signal came
        return under_way

    def close(self) -> None:
        """Give the queue back. The kernel first waits for what is in flight; harmless in a child or when done twice."""
        usable, handle = self.usable, self._handle
        self._handle = 0  # first: an interrupt may follow, and then the finaliser
        if usable:
            _call(self._destroy, handle)

    def _start(self, requests: Requests, first: int, most: int, slot: int) -> tuple[int, int]:
        """Start the next reads; return how many were, and how many (one, as event `slot`) can't be started at all."""
        started = _call(self._submit, self._handle, min(_AT_ONCE, most), requests.list_from(first))
        if started >= 0:
            return started, 0
        self._events[slot] = (requests.number(first), 0, started, 0)
        return 0, 1

    def _collect(self, least: int, most: int, slot: int) -> int:
        """Wait for completions and write them to the events from `slot` on; less than `least` after a signal."""
        address = self._events_address + slot * _EVENT.itemsize
        count = _call(self._getevents, self._handle, least, most, address)
        if count < 0 and count != -errno.EINTR:
            raise OSError(-count, f"io_getevents failed: {os.strerror(-count)}")
        return max(0, count)


@functools.cache
def _calls() -> tuple[int, int, int, int]:
    known = _CALLS.get(platform.machine())
    if known is None or sys.byteorder != "little" or sys.maxsize < 1 << 32:
        raise Unsupported(f"native AIO is not known to this package on {platform.machine()}; reads go through preadv")
    return known


@functools.cache
def _syscall() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.argtypes = [ctypes.c_long] * 6
    function.restype = ctypes.c_long
    return function


def _call(number: int, *arguments: int) -> int:
    """Make a system call of up to five arguments; return what it returns, or the negated errno."""
    padded = (*arguments, 0, 0, 0, 0, 0)[:5]
    result = _syscall()(number, *padded)
    return result if result >= 0 else -ctypes.get_errno()


def _why_refused(code: int) -> str:
    if code == errno.EAGAIN:
        cause = "the system has no more room for its queues; raise fs.aio-max-nr"
    elif code == errno.EPERM:
        cause = "a seccomp profile forbids it; allow io_setup, io_submit, io_getevents and io_destroy"
    elif code == errno.ENOSYS:
        cause = f"this kernel ({os.uname().release}) has none"
    else:
        cause = os.strerror(code)
    return f"native AIO is refused ({errno.errorcode.get(code, code)}): {cause}"
