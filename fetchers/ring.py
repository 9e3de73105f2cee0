"""io_uring as numpy arrays.

C liburing sets a ring up and enters the kernel (through ctypes, so the interpreter lock is free meanwhile); the queues
themselves are viewed as numpy structured arrays, so that thousands of reads are written with a few vector assignments
and submitted with one call.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import functools
import importlib.util
import os
import platform
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import Unsupported
from lazyio.fetchers.base import Bytes, Int64, Landed, ReadPlan, ReadStats
from lazyio.fetchers.progress import Progress
from lazyio.fetchers.reading import Reading
from lazyio.fetchers.ring_memory import CQE, SQE, IoUring, Params, view, words

# Names and values of include/uapi/linux/io_uring.h.
_OP_READ = 22
_ENTER_GETEVENTS = 1 << 0
_SETUP_CQSIZE = 1 << 3
_SETUP_SUBMIT_ALL = 1 << 7
_SETUP_COOP_TASKRUN = 1 << 8
_SETUP_SINGLE_ISSUER = 1 << 12
_SETUP_DEFER_TASKRUN = 1 << 13
_SETUP_NO_SQARRAY = 1 << 16
_SQ_CQ_OVERFLOW = 1 << 1

# Best first; a kernel that does not know a flag answers EINVAL.
_FLAG_SETS = (
    _SETUP_SUBMIT_ALL | _SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN,
    _SETUP_SUBMIT_ALL | _SETUP_SINGLE_ISSUER | _SETUP_COOP_TASKRUN,
    _SETUP_SUBMIT_ALL | _SETUP_COOP_TASKRUN,
    _SETUP_SUBMIT_ALL,
    0,
)
MAX_REFUSALS = 2000  # of a submission while nothing is in flight, a millisecond apart
_FEW_READS = 64
MAX_ENTRIES = 32768  # of the submission queue; the completion queue holds twice that

# Plans begun in a thread whose ring another thread has closed: nobody can wait for what is in flight of them, so their
# memory is never given back.
_out_of_reach: list[Reading] = []


def _library_paths() -> list[str]:
    """Where liburing may be: in the wheel of that name, then the system's."""
    wheel = importlib.util.find_spec("liburing")
    inside = Path(wheel.origin).with_name("liburing.so") if wheel and wheel.origin else None
    return [str(path) for path in (inside, "liburing.so.2") if path is not None]


@functools.cache
def library() -> ctypes.CDLL:
    """Load C liburing. Raises Unsupported where neither the wheel nor the system has it."""
    failures = []
    for path in _library_paths():
        try:
            loaded = ctypes.CDLL(path)
            loaded.io_uring_queue_init_params.argtypes = [ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p]
            loaded.io_uring_queue_exit.argtypes = [ctypes.c_void_p]
            loaded.io_uring_queue_exit.restype = None
            loaded.io_uring_enter.argtypes = [
                ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p,
            ]  # fmt: skip
        except (OSError, AttributeError) as error:
            failures.append(f"{path}: {error}")
        else:
            return loaded
    raise Unsupported(
        "liburing is not to be found ("
        + "; ".join(failures)
        + "): install the liburing package, or the system's liburing2, version 2.3 or newer"
    )


class Ring:
    """One io_uring of one thread: it may be used by the thread and the process that made it, and no other.

    `depth` is the most reads in flight. Between calls nothing is, but for one plan that was begun.
    Raises Unsupported where the kernel refuses a ring.
    """

    def __init__(self, depth: int) -> None:
        self.pid = os.getpid()
        self._library = library()
        self._ring = IoUring()
        self._address = ctypes.addressof(self._ring)
        self.depth, flags = self._set_up(min(depth, MAX_ENTRIES))
        submission, completion = self._ring.sq, self._ring.cq
        entries = int(words(submission.queue.ring_entries, 1)[0])
        self._sq_mask = entries - 1
        self._sq_head = words(submission.queue.head, 1)
        self._sq_tail = words(submission.queue.tail, 1)
        self._sq_flags = words(submission.queue.flags, 1)
        sqes = view(submission.sqes, entries, SQE)
        self._cq_mask = int(words(completion.queue.ring_mask, 1)[0])
        self._cq_head = words(completion.queue.head, 1)
        self._cq_tail = words(completion.queue.tail, 1)
        cqes = view(completion.cqes, self._cq_mask + 1, CQE)
        self._cq_user, self._cq_result = cqes["user_data"], cqes["res"]
        if not flags & _SETUP_NO_SQARRAY:
            words(submission.array, entries)[:] = np.arange(entries, dtype=np.uint32)
        sqes[:] = np.zeros((), SQE)
        sqes["opcode"] = _OP_READ
        self._sq_fd, self._sq_offset, self._sq_address = sqes["fd"], sqes["off"], sqes["addr"]
        self._sq_length, self._sq_user = sqes["len"], sqes["user_data"]
        self._thread = threading.get_ident()
        self._generation = 0
        self._refusals = 0
        self._reading: Reading | None = None

    def _set_up(self, depth: int) -> tuple[int, int]:
        """Make the ring, smaller where memory is short; return its depth and the flags in force."""
        refused = 0
        while True:
            for flags in _FLAG_SETS:
                if not flags & _SETUP_DEFER_TASKRUN and platform.machine() not in ("x86_64", "AMD64"):
                    break  # completions could be posted at any time, and numpy has no acquire load
                params = Params(flags=flags | _SETUP_CQSIZE, cq_entries=max(depth, 2))
                refused = -self._library.io_uring_queue_init_params(depth, self._address, ctypes.addressof(params))
                if not refused:
                    return depth, params.flags
                if refused != errno.EINVAL:
                    break
            if refused != errno.ENOMEM or depth <= 16:
                raise Unsupported(why_refused(refused))
            depth //= 2

    def read(
        self,
        plan: ReadPlan,
        progress: Progress,
        descriptors: NDArray[np.int32],
        buffer: Bytes,
        landed: Landed | None = None,
    ) -> ReadStats:
        """Read all windows of `plan` into `buffer`, at most `depth` at once.

        `descriptors` has one entry a file of the plan. Returns when nothing is in flight any more, also on an error:
        `progress.failure` tells. `service_s` is reads in flight integrated over time.
        """
        reading = self._open(plan, progress, descriptors, buffer)
        self._carry_on(reading, landed)
        return reading.stats

    def begin(self, plan: ReadPlan, progress: Progress, descriptors: NDArray[np.int32], buffer: Bytes) -> Reading:
        """Submit what there is room for and return; `finish` waits. Arguments are those of `read`.

        What has ended counts as in flight until it is looked for. Whatever the ring does next carries this on first.
        """
        reading = self._open(plan, progress, descriptors, buffer)
        with contextlib.suppress(OSError):  # it can't be carried on then, and that shows when it is finished
            self._fill(reading)
            self._enter(0)
            reading.intact = True
        return reading

    def finish(self, reading: Reading) -> bool:
        """Wait for what was begun; whether it is complete. If not it was interrupted or refused, and must be read anew.

        Only in the thread of this ring, or where the ring is closed.
        """
        if self._reading is reading and not self._ended_at_once(reading):
            self._settle()
        return reading.complete

    def close(self) -> None:
        """Give the ring back, when nothing is in flight. Harmless in a child: it drops the child's copies only."""
        if not self._address:
            return
        if self._reading is not None and self.pid == os.getpid():
            if self._thread == threading.get_ident():
                self._drain()
            else:
                _out_of_reach.append(self._reading)
        self._reading = None
        address, self._address = self._address, 0  # first: an interrupt may follow, and then the finaliser
        self._library.io_uring_queue_exit(address)

    def _open(self, plan: ReadPlan, progress: Progress, descriptors: NDArray[np.int32], buffer: Bytes) -> Reading:
        """Let nothing else be in flight from now on."""
        self._settle()
        self._generation = (self._generation + 1) & 0x7FFFFFFF
        self._reading = Reading(plan, progress, descriptors, buffer, self._generation << 32)
        return self._reading

    def _ended_at_once(self, reading: Reading) -> bool:
        """Wait once for all reads of what was begun; whether that was all there was to do."""
        if not (reading.intact and reading.all_written):
            return False
        try:
            self._enter(len(reading.plan))
        except OSError:
            reading.intact = False
            return False
        reading.spent(len(reading.plan))
        if not self._took_all(reading):
            return False
        reading.complete, self._reading = True, None
        return True

    def _settle(self) -> None:
        """Carry on what was begun before, or wait for what an interrupt has left of it."""
        earlier = self._reading
        if earlier is None:
            return
        if earlier.intact:
            with contextlib.suppress(OSError):  # for who finishes it to find, by reading anew
                self._carry_on(earlier)
        else:
            self._drain()
        self._reading = None

    def _carry_on(self, reading: Reading, landed: Landed | None = None) -> None:
        """Read what is missing; nothing is in flight afterwards, also on an error."""
        reading.intact = False
        progress, step = reading.progress, max(1, self.depth // 4)
        try:
            while progress.failure is None and (not reading.all_written or len(reading.again) or self._in_flight()):
                if not reading.all_written or len(reading.again):
                    self._fill(reading)
                in_flight = self._in_flight()
                whole = landed is None and reading.all_written
                self._enter(in_flight if whole else min(in_flight, step))
                reading.spent(in_flight)
                windows, results = self._reap(reading.tag)
                if len(windows):
                    reading.settle(windows, results)
                    if landed is not None:
                        landed(progress.landed())
            reading.complete = True
        finally:
            self._drain()
            self._reading = None

    def _fill(self, reading: Reading) -> None:
        """Write the next reads to the submission queue, as far as there is room."""
        file, offset, length, dest, numbers = reading.next(self._room(self._in_flight()))
        self._write(file, offset, length, dest, numbers, reading.tag, reading.descriptors, reading.address)
        reading.stats.reads += len(numbers)

    def _room(self, in_flight: int) -> int:
        """How many reads can be written now without wrapping around the end of the submission queue."""
        tail = int(self._sq_tail[0])
        waiting = (tail - int(self._sq_head[0])) & 0xFFFFFFFF
        return min(self.depth - in_flight, self._sq_mask + 1 - waiting, self._sq_mask + 1 - (tail & self._sq_mask))

    def _write(
        self,
        file: NDArray[np.int32],
        offset: Int64,
        length: Int64,
        dest: Int64,
        numbers: Int64,
        tag: int,
        descriptors: NDArray[np.int32],
        address: int,
    ) -> None:
        if not len(numbers):
            return
        tail = int(self._sq_tail[0])
        slot = tail & self._sq_mask
        entries = slice(slot, slot + len(numbers))
        self._sq_fd[entries] = descriptors[file] if len(descriptors) > 1 else descriptors[0]
        self._sq_offset[entries] = offset
        self._sq_address[entries] = dest + address
        self._sq_length[entries] = length
        self._sq_user[entries] = numbers + tag
        self._sq_tail[0] = (tail + len(numbers)) & 0xFFFFFFFF

    def _enter(self, wait_for: int) -> None:
        """Submit what is written and wait for completions. The kernel may take less, or be interrupted: call again."""
        waiting = (int(self._sq_tail[0]) - int(self._sq_head[0])) & 0xFFFFFFFF
        taken = self._library.io_uring_enter(self._ring.ring_fd, waiting, wait_for, _ENTER_GETEVENTS, None)
        if taken >= 0:
            self._refusals = 0
            return
        if taken == -errno.EINTR:
            return
        if taken not in (-errno.EAGAIN, -errno.EBUSY):
            raise OSError(-taken, f"io_uring_enter failed: {os.strerror(-taken)}")
        # The kernel is short of memory or wants its completions collected: let what is under way end first.
        if self._under_way():
            self._library.io_uring_enter(self._ring.ring_fd, 0, 1, _ENTER_GETEVENTS, None)
            self._refusals = 0
            return
        self._refusals += 1
        if self._refusals > MAX_REFUSALS:
            raise OSError(-taken, f"io_uring took no read in {self._refusals} attempts: {os.strerror(-taken)}")
        time.sleep(0.001)

    def _reap(self, tag: int) -> tuple[Int64, Int64]:
        """Take all completions there are: window numbers and results."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        count = (tail - head) & 0xFFFFFFFF
        slot = head & self._cq_mask
        windows = self._cq_user[slot : slot + count] - tag
        results = self._cq_result[slot : slot + count].astype(np.int64)
        if len(windows) < count:  # the rest stands at the beginning of the queue
            rest = slice(0, count - len(windows))
            windows = np.concatenate([windows, self._cq_user[rest] - tag])
            results = np.concatenate([results, self._cq_result[rest]])
        self._cq_head[0] = tail
        assert not int(self._sq_flags[0]) & _SQ_CQ_OVERFLOW, "more reads in flight than completions fit"
        return windows, results

    def _took_all(self, reading: Reading) -> bool:
        """Take the completions of all reads of a plan, if they are all there and each brought all of its window.

        It is how a short plan usually ends, and looks at no read by itself: none brings more than was asked of it, so
        all brought all if their sum is that of the plan.
        """
        head, count = int(self._cq_head[0]), len(reading.plan)
        tail, slot = (head + count) & 0xFFFFFFFF, head & self._cq_mask
        if int(self._cq_tail[0]) != tail or slot + count > self._cq_mask + 1:
            return False
        results = self._cq_result[slot : slot + count]
        # Plain integers are faster for what a decode step reads.
        total = sum(results.tolist()) if count <= _FEW_READS else int(results.sum())
        if total != reading.plan.buffer_bytes:
            return False
        self._cq_head[0] = tail
        reading.progress.all_arrived()
        return True

    def _in_flight(self) -> int:
        """Reads that are written and whose completions are not taken, from the queues' own counters."""
        return (int(self._sq_tail[0]) - int(self._cq_head[0])) & 0xFFFFFFFF

    def _under_way(self) -> int:
        """Reads the kernel has taken and not yet answered, from the queues' own counters."""
        return (int(self._sq_head[0]) - int(self._cq_head[0])) & 0xFFFFFFFF

    def _drain(self) -> None:
        """Wait until the kernel writes to no buffer any more; an interrupt is raised only afterwards."""
        interrupted: KeyboardInterrupt | None = None
        self._sq_tail[0] = self._sq_head[0]  # what was not taken never will be
        while self._under_way():
            try:
                under_way = self._under_way()
                self._library.io_uring_enter(self._ring.ring_fd, 0, under_way, _ENTER_GETEVENTS, None)
                self._cq_head[0] = self._cq_tail[0]
            except KeyboardInterrupt as interrupt:
                interrupted = interrupt
        if interrupted is not None:
            raise interrupted


def why_refused(code: int) -> str:
    """What refuses a ring, or to enter one, with this errno, and what to do; words for a user."""
    if code == errno.EPERM:
        try:
            setting = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
        except OSError:
            setting = "0"
        cause = (
            f"kernel.io_uring_disabled is {setting}; set it to 0"
            if setting != "0"
            else "a seccomp profile forbids it, as those of containers do; allow io_uring_setup, io_uring_enter and "
            "io_uring_register"
        )
    elif code == errno.ENOSYS:
        cause = f"this kernel ({os.uname().release}) has no io_uring"
    elif code == errno.ENOMEM:
        cause = "no memory may be locked for it; raise RLIMIT_MEMLOCK (ulimit -l)"
    elif code in (errno.EMFILE, errno.ENFILE):
        cause = "there are too many open files; raise RLIMIT_NOFILE (ulimit -n)"
    else:
        cause = f"the kernel ({os.uname().release}) takes none of the flag sets that are safe on {platform.machine()}"
    return f"io_uring is refused ({errno.errorcode.get(code, code)}): {cause}"
