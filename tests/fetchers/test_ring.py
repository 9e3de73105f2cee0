"""The ring itself, and what a kernel may answer that it seldom does."""

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lazyio.errors import Unsupported
from lazyio.fetchers import ring as rings
from lazyio.fetchers.base import Alignment, Bytes, ReadPlan
from lazyio.fetchers.files import FileSet
from lazyio.fetchers.progress import Progress
from lazyio.fetchers.ring import Ring

ROW = 90
CONTENT = np.random.default_rng(7).integers(0, 256, ROW * 50_000, np.uint8)

NONE = np.empty(0, np.int64)

Enter = Callable[[int, int, int, int, None], int]


class Library:
    """Real liburing, with a hand in `io_uring_enter`: `answers` come before the kernel's own."""

    def __init__(self) -> None:
        self.real = rings.library()
        self.submitted: list[int] = []
        self.answers: list[int | Enter] = []

    def io_uring_enter(self, descriptor: int, submit: int, wait: int, flags: int, _: None) -> int:
        self.submitted.append(submit)
        answer = self.answers.pop(0) if self.answers else self.real.io_uring_enter
        return answer if isinstance(answer, int) else answer(descriptor, submit, wait, flags, None)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    try:
        Ring(1).close()
    except Unsupported as refused:
        pytest.skip(str(refused))
    library = Library()
    monkeypatch.setattr(rings, "library", lambda: library)
    return library


@pytest.fixture
def ring(library: Library) -> Iterator[Ring]:
    ring = Ring(64)
    yield ring
    assert not ring._under_way()
    ring.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileSet]:
    path = tmp_path_factory.mktemp("ring") / "rows"
    CONTENT.tofile(path)
    files = FileSet([str(path)])
    yield files
    files.close()


def plan_of(rows: np.ndarray) -> ReadPlan:
    length = np.full(len(rows), ROW)
    return ReadPlan(
        np.zeros(len(rows), np.int32), rows * ROW, length, length, np.arange(len(rows)) * ROW, len(rows) * ROW
    )


def scattered(count: int, seed: int = 0) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(len(CONTENT) // ROW, count, replace=False))


class Reading:
    """One read of rows: its buffer, progress and statistics."""

    def __init__(self, ring: Ring, files: FileSet, rows: np.ndarray, landed: Callable[[int], None] | None = None):
        self.rows = rows
        plan = plan_of(rows)
        self.buffer: Bytes = np.zeros(plan.buffer_bytes, np.uint8)
        self.progress = Progress(plan, files, Alignment())
        descriptors = np.array(files.descriptors, np.int32)
        self.stats = ring.read(plan, self.progress, descriptors, self.buffer, landed)

    def check(self) -> None:
        assert self.progress.failure is None
        np.testing.assert_array_equal(self.buffer.reshape(-1, ROW), CONTENT.reshape(-1, ROW)[self.rows])


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3, 64, 4096])
def test_plans_of_all_lengths_one_after_the_other(library: Library, files: FileSet, depth: int) -> None:
    ring = Ring(depth)
    for seed, count in enumerate((1, 2, 63, 64, 65, 700)):
        reading = Reading(ring, files, scattered(count, seed))
        reading.check()
        assert reading.stats.reads == count
        assert reading.stats.service_s > 0
        assert not ring._under_way()
    ring.close()


def test_more_reads_than_the_longest_queue_holds(library: Library, files: FileSet) -> None:
    ring = Ring(1 << 20)
    assert ring.depth == rings.MAX_ENTRIES
    Reading(ring, files, np.arange(40_000)).check()
    ring.close()


def test_an_empty_plan_enters_nothing(ring: Ring, library: Library, files: FileSet) -> None:
    Reading(ring, files, np.empty(0, np.int64)).check()
    assert library.submitted == []


def test_sixteen_rows_are_submitted_with_one_call(ring: Ring, library: Library, files: FileSet) -> None:
    Reading(ring, files, scattered(16)).check()
    assert library.submitted == [16]


def test_no_more_reads_are_in_flight_than_the_depth(library: Library, files: FileSet) -> None:
    ring = Ring(3)  # of a queue of 4
    library.answers = [0, 0, 0]
    Reading(ring, files, scattered(100), lambda windows: None).check()
    assert max(library.submitted) == 3
    ring.close()


def test_landed_is_told_as_windows_arrive(ring: Ring, files: FileSet) -> None:
    told: list[int] = []
    Reading(ring, files, scattered(500), told.append).check()
    assert told == sorted(told)
    assert told[-1] == 500
    assert len(told) > 2


def test_closing_twice_is_harmless(library: Library) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ring = Ring(8)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    ring.close()
    ring.close()
    assert len(os.listdir("/proc/self/fd")) == before


# --- begun now, finished later ---------------------------------------------------------------------------------------


class Begun:
    """Rows that were begun, with their buffer and progress."""

    def __init__(self, ring: Ring, files: FileSet, rows: np.ndarray) -> None:
        self.rows, plan = rows, plan_of(rows)
        self.buffer: Bytes = np.zeros(plan.buffer_bytes, np.uint8)
        self.progress = Progress(plan, files, Alignment())
        self.reading = ring.begin(plan, self.progress, np.array(files.descriptors, np.int32), self.buffer)

    def check(self) -> None:
        assert self.progress.failure is None
        np.testing.assert_array_equal(self.buffer.reshape(-1, ROW), CONTENT.reshape(-1, ROW)[self.rows])


@pytest.mark.parametrize("count", [0, 1, 16, 64, 700])
def test_what_was_begun_takes_one_more_call(ring: Ring, library: Library, files: FileSet, count: int) -> None:
    begun = Begun(ring, files, scattered(count))
    assert library.submitted == [min(count, 64)]
    assert ring._in_flight() == min(count, 64)
    assert ring.finish(begun.reading)
    begun.check()
    assert not ring._under_way()
    assert begun.reading.stats.reads == count
    if 0 < count <= 64:
        assert library.submitted == [count, 0]


def test_whatever_comes_next_carries_it_on(ring: Ring, files: FileSet) -> None:
    first, second = Begun(ring, files, scattered(300)), Begun(ring, files, scattered(20, 1))
    first.check()
    Reading(ring, files, scattered(300, 2)).check()
    second.check()
    assert ring.finish(second.reading)
    assert ring.finish(first.reading)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
def test_a_begin_that_submits_nothing_is_made_good(ring: Ring, library: Library, files: FileSet, code: int) -> None:
    library.answers = [-code]
    begun = Begun(ring, files, scattered(16))
    assert ring.finish(begun.reading)
    begun.check()


@pytest.mark.parametrize("when", ["begin", "finish"])
def test_a_refusal_shows_when_it_is_finished(ring: Ring, library: Library, files: FileSet, when: str) -> None:
    if when == "begin":
        library.answers = [-errno.ENXIO]
    begun = Begun(ring, files, scattered(16))
    if when == "finish":
        library.answers = [-errno.ENXIO]
    assert not ring.finish(begun.reading)
    assert not ring._under_way()
    Reading(ring, files, scattered(300, 1)).check()


def test_one_read_of_many_that_came_short_is_seen(ring: Ring, tmp_path: Path) -> None:
    path = tmp_path / "short"
    CONTENT[: 15 * ROW].tofile(path)
    short = FileSet([str(path)])
    begun = Begun(ring, short, np.arange(16))
    assert ring.finish(begun.reading)
    assert begun.progress.failure is not None
    assert begun.progress.failure.path == str(path)
    short.close()


@pytest.mark.parametrize("end", ["read", "close"])
def test_an_interrupted_begin_is_waited_for_by_what_comes_next(library: Library, files: FileSet, end: str) -> None:
    ring = Ring(64)

    def interrupt(descriptor: int, submit: int, wait: int, flags: int, _: None) -> int:
        library.real.io_uring_enter(descriptor, submit, 0, flags, None)
        raise KeyboardInterrupt

    library.answers = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        Begun(ring, files, scattered(16))
    assert ring._reading is not None
    if end == "read":
        Reading(ring, files, scattered(300, 1)).check()
        assert ring._reading is None
    before = len(library.submitted)
    ring.close()
    assert (len(library.submitted) > before) == (end == "close")


# --- what a kernel may answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
def test_a_call_that_submits_nothing_is_made_again(ring: Ring, library: Library, files: FileSet, code: int) -> None:
    library.answers = [-code, -code, -code]
    Reading(ring, files, scattered(200)).check()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY])
def test_a_kernel_that_is_short_of_memory_is_given_time(
    ring: Ring, library: Library, files: FileSet, code: int
) -> None:
    """Refused with reads under way: one of those is waited for, and nothing is submitted meanwhile."""

    def ten(descriptor: int, submit: int, wait: int, flags: int, _: None) -> int:
        return library.real.io_uring_enter(descriptor, 10, 0, 0, None)

    library.answers = [ten, -code]
    ring._reap = lambda tag, reap=ring._reap: reap(tag) if len(library.submitted) > 2 else (NONE, NONE)
    Reading(ring, files, scattered(200)).check()
    assert library.submitted[:3] == [64, 54, 0]


def test_a_kernel_may_take_less_than_it_was_given(ring: Ring, library: Library, files: FileSet) -> None:
    def half(descriptor: int, submit: int, wait: int, flags: int, _: None) -> int:
        return library.real.io_uring_enter(descriptor, submit // 2, 0, flags, None)

    library.answers = [half, half, lambda *_: 0, half, half, half]
    Reading(ring, files, scattered(500)).check()


def test_a_kernel_that_takes_nothing_is_not_asked_for_ever(
    ring: Ring, library: Library, files: FileSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "MAX_REFUSALS", 3)
    library.answers = [-errno.EAGAIN] * 10
    with pytest.raises(OSError, match="took no read in 4 attempts: Resource temporarily unavailable"):
        Reading(ring, files, scattered(20))
    library.answers = []
    Reading(ring, files, scattered(20)).check()


def test_refusals_are_counted_anew_after_a_success(
    ring: Ring, library: Library, files: FileSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "MAX_REFUSALS", 3)
    for seed in range(4):
        library.answers = [-errno.EAGAIN, -errno.EAGAIN]
        Reading(ring, files, scattered(20, seed)).check()


def test_any_other_answer_is_an_error(ring: Ring, library: Library, files: FileSet) -> None:
    library.answers = [-errno.ENXIO]
    with pytest.raises(OSError, match="io_uring_enter failed: No such device"):
        Reading(ring, files, scattered(20))
    Reading(ring, files, scattered(20)).check()


def spoil(ring: Ring, library: Library, results: list[int]) -> Enter:
    """Enter, and replace the results of the first completions that it brings."""

    def enter(descriptor: int, submit: int, wait: int, flags: int, _: None) -> int:
        head = int(ring._cq_head[0])
        taken = int(library.real.io_uring_enter(descriptor, submit, submit, flags, None))
        for number, result in enumerate(results):
            ring._cq_result[(head + number) & ring._cq_mask] = result
        return taken

    return enter


def test_short_and_transient_results_are_read_on(ring: Ring, library: Library, files: FileSet) -> None:
    library.answers = [spoil(ring, library, [10, 89, 0, -errno.EINTR, -errno.EAGAIN, -errno.EBUSY])] * 3
    reading = Reading(ring, files, scattered(200))
    reading.check()
    assert reading.progress.resumed >= 6
    assert reading.stats.reads == 200 + reading.progress.resumed


def test_an_error_leaves_nothing_in_flight(ring: Ring, library: Library, files: FileSet) -> None:
    library.answers = [spoil(ring, library, [90, -errno.EIO])]
    reading = Reading(ring, files, scattered(300))
    failure = reading.progress.failure
    assert failure is not None
    assert failure.errno == errno.EIO
    assert failure.offset == int(reading.rows[1]) * ROW
    assert not ring._under_way()
    Reading(ring, files, scattered(300, 1)).check()


def test_an_unmapped_address_is_a_real_input_error(ring: Ring) -> None:
    files = FileSet(["/proc/self/mem"])
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as there:
            there[:ROW] = CONTENT[:ROW].tobytes()
            mapped = np.frombuffer(there, np.uint8).ctypes.data
            offset, length = np.array([0, mapped]), np.array([ROW, ROW])
            plan = ReadPlan(np.zeros(2, np.int32), offset, length, length, np.array([0, ROW]), 2 * ROW)
            progress = Progress(plan, files, Alignment())
            buffer = np.zeros(2 * ROW, np.uint8)
            ring.read(plan, progress, np.array(files.descriptors, np.int32), buffer)
        assert progress.failure is not None
        assert progress.failure.errno == errno.EIO
        assert progress.failure.offset == 0
    finally:
        files.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("entered", [True, False])
def test_what_is_raised_in_the_middle_leaves_nothing_in_flight(
    ring: Ring, library: Library, files: FileSet, error: type[BaseException], entered: bool
) -> None:
    def interrupt(descriptor: int, submit: int, wait: int, flags: int, _: None) -> int:
        if entered:
            library.real.io_uring_enter(descriptor, submit, 0, flags, None)
        raise error

    library.answers = [interrupt]
    with pytest.raises(error):
        Reading(ring, files, scattered(300))
    assert not ring._under_way()
    Reading(ring, files, scattered(300, 1)).check()


def test_a_second_interrupt_waits_for_what_is_in_flight(ring: Ring, library: Library, files: FileSet) -> None:
    def interrupt(descriptor: int, submit: int, wait: int, flags: int, _: None) -> int:
        library.real.io_uring_enter(descriptor, submit, 0, flags, None)
        raise KeyboardInterrupt

    library.answers = [interrupt, interrupt, interrupt]
    with pytest.raises(KeyboardInterrupt):
        Reading(ring, files, scattered(300))
    assert not ring._under_way()
    Reading(ring, files, scattered(300, 1)).check()


def test_an_error_of_the_caller_leaves_nothing_in_flight(ring: Ring, files: FileSet) -> None:
    def landed(windows: int) -> None:
        raise RuntimeError(windows)

    with pytest.raises(RuntimeError):
        Reading(ring, files, scattered(300), landed)
    assert not ring._under_way()
    Reading(ring, files, scattered(300, 1)).check()


# --- setting up ------------------------------------------------------------------------------------------------------


class SetUp:
    """Real liburing that first gives `answers` when a ring is set up, and keeps what it was asked for."""

    def __init__(self, answers: list[int]) -> None:
        self.real = rings.library()
        self.answers = answers
        self.asked: list[tuple[int, int]] = []

    def io_uring_queue_init_params(self, depth: int, ring: int, params: int) -> int:
        self.asked.append((depth, rings.Params.from_address(params).flags))
        return self.answers.pop(0) if self.answers else self.real.io_uring_queue_init_params(depth, ring, params)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


def set_up(monkeypatch: pytest.MonkeyPatch, *answers: int, machine: str = "x86_64") -> SetUp:
    library = SetUp([-answer for answer in answers])
    monkeypatch.setattr(rings, "library", lambda: library)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    return library


@pytest.mark.usefixtures("library")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the older flags are safe on x86-64 alone")
@pytest.mark.parametrize("unknown", range(5))
def test_an_older_kernel_gets_fewer_flags(monkeypatch: pytest.MonkeyPatch, files: FileSet, unknown: int) -> None:
    library = set_up(monkeypatch, *[errno.EINVAL] * unknown)
    ring = Ring(32)
    Reading(ring, files, scattered(100)).check()
    ring.close()
    assert [flags & ~rings._SETUP_CQSIZE for _, flags in library.asked] == list(rings._FLAG_SETS[: unknown + 1])


@pytest.mark.usefixtures("library")
def test_elsewhere_completions_must_come_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    library = set_up(monkeypatch, errno.EINVAL, machine="aarch64")
    with pytest.raises(Unsupported, match="none of the flag sets that are safe on aarch64"):
        Ring(32)
    assert len(library.asked) == 1


@pytest.mark.usefixtures("library")
def test_short_memory_makes_a_shorter_queue(monkeypatch: pytest.MonkeyPatch, files: FileSet) -> None:
    set_up(monkeypatch, errno.ENOMEM, errno.ENOMEM)
    ring = Ring(4096)
    assert ring.depth == 1024
    Reading(ring, files, scattered(2000)).check()
    ring.close()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (errno.EPERM, r"io_uring is refused \(EPERM\): .*(seccomp profile|io_uring_disabled)"),
        (errno.ENOSYS, r"\(ENOSYS\): this kernel .* has no io_uring"),
        (errno.ENOMEM, r"\(ENOMEM\): .*raise RLIMIT_MEMLOCK"),
        (errno.EMFILE, r"\(EMFILE\): .*raise RLIMIT_NOFILE"),
        (errno.EINVAL, r"\(EINVAL\): .*none of the flag sets"),
    ],
)
def test_a_refusal_names_cause_and_setting(monkeypatch: pytest.MonkeyPatch, code: int, cause: str) -> None:
    set_up(monkeypatch, *[code] * 100)
    with pytest.raises(Unsupported, match=cause):
        Ring(4096)


def test_without_liburing_it_is_said_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "liburing.so"
    empty.write_bytes(b"")
    monkeypatch.setattr(rings, "_library_paths", lambda: [str(empty), "libthere-is-none.so.2"])
    rings.library.cache_clear()
    try:
        with pytest.raises(Unsupported, match=r"liburing\.so.*libthere-is-none\.so\.2.*install the liburing package"):
            rings.library()
    finally:
        rings.library.cache_clear()


def test_a_library_that_is_not_liburing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ctypes.util.find_library("c")
    monkeypatch.setattr(rings, "_library_paths", lambda: [str(name)])
    rings.library.cache_clear()
    try:
        with pytest.raises(Unsupported, match="io_uring_queue_init_params"):
            rings.library()
    finally:
        rings.library.cache_clear()
