import errno
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio.errors import ReadError, Unsupported
from lazyio.fetchers import FetcherOptions
from lazyio.fetchers import ring as rings
from lazyio.fetchers import uring as fetchers
from lazyio.fetchers.conformance import MadeTable, run_in_child, write_rows
from lazyio.fetchers.uring import UringFetcher


@pytest.fixture
def table(tmp_path: Path) -> MadeTable:
    return write_rows(tmp_path, 90, [("a", 77, 2000)])


def open_uring(table: MadeTable, **options: Any) -> UringFetcher:
    try:
        return UringFetcher(table.extents, table.row_bytes, FetcherOptions(**options))
    except Unsupported as refused:
        pytest.skip(str(refused))


@pytest.fixture
def fetcher(table: MadeTable) -> Iterator[UringFetcher]:
    with open_uring(table) as fetcher:
        yield fetcher


def read(fetcher: UringFetcher, table: MadeTable, ids: np.ndarray) -> None:
    plan = table.plan(fetcher, ids)
    whole = np.zeros(plan.reads.buffer_bytes + 4096, np.uint8)
    buffer = whole[-whole.ctypes.data % 4096 :]
    fetcher.read(plan.reads, buffer)
    np.testing.assert_array_equal(buffer[plan.position[:, None] + np.arange(90)], table.content[ids])


def open_rings() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that lists them
            count += os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[io_uring]"
    return count


def test_it_says_what_depth_it_has(table: MadeTable) -> None:
    with open_uring(table, queue_depth=5) as fetcher:
        assert fetcher.queue_depth == 5
        assert fetcher.workers == 1
        read(fetcher, table, np.arange(0, 2000, 7))


def test_sixteen_rows_are_in_flight_at_once(
    fetcher: UringFetcher, table: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = fetcher._ring()
    library, submitted = ring._library, []

    class Counting:
        def io_uring_enter(self, descriptor: int, submit: int, *others: object) -> int:
            submitted.append(submit)
            return int(library.io_uring_enter(descriptor, submit, *others))

    with monkeypatch.context() as patch:
        patch.setattr(ring, "_library", Counting())
        read(fetcher, table, np.arange(0, 2000, 125))
    assert submitted[0] == 16
    assert sum(submitted) == 16


def test_threads_have_rings_of_their_own_that_end_with_them(fetcher: UringFetcher, table: MadeTable) -> None:
    before = open_rings()
    during: list[int] = []

    def work() -> None:
        read(fetcher, table, np.arange(10))
        during.append(open_rings())

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert during == [before + 1] * 3
    assert open_rings() == before


def test_closing_ends_the_rings_of_all_threads(table: MadeTable) -> None:
    before = open_rings()
    fetcher = open_uring(table)
    have_read, may_end = threading.Event(), threading.Event()

    def work() -> None:
        read(fetcher, table, np.arange(10))
        have_read.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    have_read.wait()
    assert open_rings() == before + 2
    fetcher.close()
    gc.collect()
    assert open_rings() == before
    may_end.set()
    thread.join()


def test_a_child_has_a_ring_of_its_own(fetcher: UringFetcher, table: MadeTable) -> None:
    parents = fetcher._ring()

    def check() -> None:
        read(fetcher, table, np.arange(100))
        assert fetcher._ring() is not parents
        fetcher.close()

    run_in_child(check)
    assert fetcher._ring() is parents
    read(fetcher, table, np.arange(100))


def test_a_ring_that_reads_nothing_is_no_ring(table: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    open_uring(table).close()

    class Refusing(rings.Ring):
        def _write(self, *arguments: Any) -> None:
            super()._write(*arguments)
            self._sq_fd[:] = -1

    monkeypatch.setattr(fetchers, "Ring", Refusing)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unsupported, match=r"a first read through it failed: .*Bad file descriptor"):
        UringFetcher(table.extents, table.row_bytes, FetcherOptions())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_ring_that_may_be_made_and_not_entered_is_refused_like_one_that_may_not_be_made(
    table: MadeTable, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    open_uring(table).close()

    class Refused(rings.Ring):
        def _enter(self, wait_for: int) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fetchers, "Ring", Refused)
    with pytest.raises(Unsupported) as caught:
        UringFetcher(table.extents, table.row_bytes, FetcherOptions())
    assert str(caught.value) == rings.why_refused(code)


def test_a_refused_ring_leaves_nothing_open(table: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(depth: int) -> None:
        raise Unsupported("no ring")

    monkeypatch.setattr(fetchers, "Ring", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unsupported, match="no ring"):
        UringFetcher(table.extents, table.row_bytes, FetcherOptions())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_call_that_fails_as_a_whole_is_a_read_error(
    fetcher: UringFetcher, table: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def io_uring_enter(self, *arguments: object) -> int:
            return -errno.ENXIO

    with monkeypatch.context() as patch:
        patch.setattr(fetcher._ring(), "_library", Failing())
        with pytest.raises(ReadError, match=r"10 reads, the first of .*/a, failed together") as caught:
            read(fetcher, table, np.arange(0, 2000, 200))
    assert caught.value.errno == errno.ENXIO
    read(fetcher, table, np.arange(0, 2000, 200))


def test_an_interrupt_while_the_ring_is_given_back_is_raised(table: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_rings()
    fetcher = open_uring(table)
    ring = fetcher._ring()
    library, exits = ring._library, []

    class Interrupted:
        def io_uring_queue_exit(self, address: int) -> None:
            exits.append(address)
            library.io_uring_queue_exit(address)
            raise KeyboardInterrupt

    monkeypatch.setattr(ring, "_library", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        fetcher.close()
    del fetcher, ring
    gc.collect()
    assert len(exits) == 1
    assert open_rings() == before
