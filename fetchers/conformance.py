"""Tests that every fetcher passes, of this package or of another.

Subclass `FetcherConformance`, say how a fetcher is made, and let pytest collect the subclass:

    class TestMine(FetcherConformance):
        def make(self, extents, row_bytes):
            return MyFetcher(extents, row_bytes, FetcherOptions())

A fetcher that can't work here skips the tests: call `pytest.skip(reason)` in `make`.
"""
# ruff: noqa: D102 - the names of the tests say what they test

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lazyio.errors import ReadError, TableError
from lazyio.fetchers.base import Alignment, Bytes, Extent, Fetcher, Int64, Landed, ReadPlan, ReadStats, RowFetcher
from lazyio.ple.plan import Geometry, RowPlan

__all__ = ["FetcherConformance", "MadeTable", "run_in_child", "write_rows"]

_POISONS = (0x5A, 0xA5)  # a byte that nobody wrote differs from what it should be under one of them at least
_GUARD_BYTES = 8192
_THREADS = 8

# Name of a layout: bytes of a row, and the file, offset and rows of each extent. Files end with their last row.
_LAYOUTS: dict[str, tuple[int, list[tuple[str, int, int]]]] = {
    "one extent": (90, [("a", 77, 1500)]),
    "one byte a row": (1, [("a", 5, 3000)]),
    "rows longer than an OS page": (5040, [("a", 4099, 40)]),
    "several extents and files": (90, [("a", 131, 400), ("b", 3, 350), ("a", 36188, 300), ("c", 0, 1)]),
    "beyond 4 GiB": (82, [("a", (1 << 32) + 7, 200), ("a", (5 << 30) + 513, 300)]),
}


@dataclass(frozen=True, slots=True)
class MadeTable:
    """A table whose rows are known."""

    extents: tuple[Extent, ...]
    content: Bytes  # [rows, row_bytes]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.content.shape[1])

    def plan(self, fetcher: Fetcher, ids: Int64) -> RowPlan:
        """Plan the reads of rows `ids`, ascending and distinct, for a fetcher that was made for this table."""
        return Geometry(self.extents, self.row_bytes, fetcher.files.index).plan(ids, fetcher.alignment)


def write_rows(folder: Path, row_bytes: int, places: Sequence[tuple[str, int, int]]) -> MadeTable:
    """Write random rows to files of `folder`; each place is a file's name, an offset in bytes and a number of rows."""
    content = np.random.default_rng(row_bytes).integers(0, 256, (sum(rows for *_, rows in places), row_bytes), np.uint8)
    extents: list[Extent] = []
    first = 0
    for name, offset, rows in places:
        path = str(folder / name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, content[first : first + rows].tobytes(), offset)
        os.close(descriptor)
        extents.append(Extent(path, offset, first, rows))
        first += rows
    return MadeTable(tuple(extents), content)


def run_in_child(check: Callable[[], object], *, limit_s: float = 30) -> None:
    """Run `check` in a forked child. Raises AssertionError, with its traceback, if it fails, hangs or is killed."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, forking a process with threads warns. What comes of that is what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _be_the_child(check, writing, limit_s)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != -signal.SIGALRM, f"the child hung for {limit_s} s:\n{told}"
    assert code >= 0, f"the child was killed by {signal.Signals(-code).name}"
    assert code == 0, f"the child failed:\n{told}"


def _be_the_child(check: Callable[[], object], writing: int, limit_s: float) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=writing, chain=True)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        check()
        code = 0
    except BaseException:
        os.write(writing, traceback.format_exc().encode())
    finally:
        os._exit(code)


class _Guarded:
    """A buffer that is aligned as asked and no better, full of one byte, with guards before and behind."""

    def __init__(self, size: int, alignment: Alignment, poison: int) -> None:
        self._poison = poison
        step = alignment.memory
        self._whole = np.full(size + 2 * _GUARD_BYTES + 4 * step, poison, np.uint8)
        address = self._whole.ctypes.data + _GUARD_BYTES
        self._start = _GUARD_BYTES + (-address % (2 * step)) + step
        self._stop = self._start + size

    @property
    def lent(self) -> Bytes:
        """What the fetcher is given: more than it may write to."""
        return self._whole[self._start : self._stop + _GUARD_BYTES]

    def check(self) -> None:
        outside = np.concatenate([self._whole[: self._start], self._whole[self._stop :]])
        assert (outside == self._poison).all(), "bytes outside of the plan's buffer were written"


class FetcherConformance:
    """The contract of `lazyio.fetchers.base.Fetcher`, as tests."""

    child_limit_s: float = 30  # a child that takes longer hangs

    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        """Make the fetcher that is tested, on these extents. The only thing that a subclass must say."""
        raise NotImplementedError

    # --- bytes -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_random_rows(self, layout: str, tmp_path: Path) -> None:
        table = _table(layout, tmp_path)
        random = np.random.default_rng(1)
        with self._open(table) as fetcher:
            for count in (1, 2, 16, len(table.content) // 3):
                _check_read(fetcher, table, np.sort(random.choice(len(table.content), count, replace=False)))

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_all_rows(self, layout: str, tmp_path: Path) -> None:
        table = _table(layout, tmp_path)
        with self._open(table) as fetcher:
            _check_read(fetcher, table, np.arange(len(table.content)))

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_first_and_last_row_of_each_extent(self, layout: str, tmp_path: Path) -> None:
        table = _table(layout, tmp_path)
        edges = {row for extent in table.extents for row in (extent.first_row, extent.first_row + extent.rows - 1)}
        with self._open(table) as fetcher:
            for row in sorted(edges):
                _check_read(fetcher, table, np.array([row]))
            _check_read(fetcher, table, np.array(sorted(edges)))

    def test_runs_of_neighbours(self, tmp_path: Path) -> None:
        table = _table("one extent", tmp_path)
        ids = np.concatenate([np.arange(3, 400), [402, 404], np.arange(700, 703), [1499]])
        with self._open(table) as fetcher:
            _check_read(fetcher, table, ids)

    def test_an_empty_plan_reads_nothing(self, tmp_path: Path) -> None:
        for layout in ("one extent", "several extents and files"):
            table = _table(layout, tmp_path)
            with self._open(table) as fetcher:
                _check_read(fetcher, table, np.empty(0, np.int64))

    def test_rows_are_taken_in_any_order(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table) as fetcher:
            if not isinstance(fetcher, RowFetcher):
                pytest.skip("its rows do not lie in addressable memory")
            ids = np.random.default_rng(2).integers(0, len(table.content), 2500)
            out = np.empty((len(ids), table.row_bytes), np.uint8)
            fetcher.take(ids, out)
            assert_array_equal(out, table.content[ids])

    # --- progress and failure ----------------------------------------------------------------------------------------

    def test_landed_is_truthful_and_only_grows(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table) as fetcher:
            plan = table.plan(fetcher, np.arange(0, len(table.content), 2)).reads
            buffer = _Guarded(plan.buffer_bytes, fetcher.alignment, _POISONS[0]).lent
            told: list[int] = [0]

            def landed(windows: int) -> None:
                assert threading.get_ident() == caller, "landed was called from another thread"
                assert told[-1] <= windows <= len(plan), f"landed({windows}) after landed({told[-1]})"
                _check_windows(fetcher, plan, buffer, range(told[-1], windows))
                told.append(windows)

            caller = threading.get_ident()
            fetcher.read(plan, buffer, landed)
            _check_windows(fetcher, plan, buffer, range(len(plan)))

    def test_a_truncated_file_is_an_error_or_the_old_bytes(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table) as fetcher:
            ids = np.arange(len(table.content))
            _check_read(fetcher, table, ids[::7])
            cut = Path(table.extents[1].path)
            os.truncate(cut, cut.stat().st_size // 2)
            # A fetcher that maps the file without looking is killed by this, and should not take the tests with it.
            self._in_child(lambda: _check_truncated(fetcher, table, ids, str(cut)))

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table):
            pass  # skips here where it can't work
        before = _descriptors()
        os.remove(table.extents[1].path)
        with pytest.raises(TableError, match=os.path.basename(table.extents[1].path)):
            self._open(table)
        gc.collect()
        assert _descriptors() == before

    # --- threads, processes, resources -------------------------------------------------------------------------------

    def test_threads_read_at_once(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        start = threading.Barrier(_THREADS)
        with self._open(table) as fetcher, ThreadPoolExecutor(_THREADS) as pool:

            def work(number: int) -> None:
                start.wait()
                for step in (5, 3, 2):
                    _check_read(fetcher, table, np.arange(number, len(table.content), _THREADS * step))

            list(pool.map(work, range(_THREADS)))

    def test_a_child_reads_after_its_parent_has(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table) as fetcher:
            ids = np.arange(0, len(table.content), 3)
            _check_read(fetcher, table, ids)
            self._in_child(lambda: _check_read(fetcher, table, ids))
            _check_read(fetcher, table, ids)

    def test_a_child_reads_while_another_thread_of_its_parent_does(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        done = threading.Event()
        with self._open(table) as fetcher, ThreadPoolExecutor(1) as pool:

            def keep_reading() -> None:
                while not done.is_set():
                    _check_read(fetcher, table, np.arange(0, len(table.content), 5))

            reading = pool.submit(keep_reading)
            try:
                for _ in range(4):
                    self._in_child(lambda: _check_read(fetcher, table, np.arange(1, len(table.content), 3)))
            finally:
                done.set()
            reading.result()

    def test_closing_frees_everything(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        gc.collect()
        before, threads = _descriptors(), set(threading.enumerate())
        with self._open(table) as fetcher:
            ids = np.arange(0, len(table.content), 3)
            _check_read(fetcher, table, ids)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(_check_read, fetcher, table, ids).result()
        gc.collect()
        assert _descriptors() == before
        assert set(threading.enumerate()) <= threads
        mapped = Path("/proc/self/maps").read_text()
        assert not [extent.path for extent in table.extents if extent.path in mapped]

    # --- what it says of itself --------------------------------------------------------------------------------------

    def test_attributes(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        before = _descriptors()
        with self._open(table) as fetcher:
            assert isinstance(fetcher.name, str)
            assert fetcher.name
            assert fetcher.queue_depth >= 1
            assert fetcher.workers >= 1
            assert fetcher.fell_back is None or fetcher.fell_back.strip()
            for number in (fetcher.alignment.offset, fetcher.alignment.memory):
                assert number >= 1
                assert number.bit_count() == 1, f"an alignment of {number} is no power of two"
            if isinstance(fetcher, RowFetcher):
                assert fetcher.alignment == Alignment(), "the windows of a RowFetcher are whole rows"
            direct = {path for number, path in (_descriptors() - before) if _is_direct(number)}
            wanted = {os.path.realpath(extent.path) for extent in table.extents} if fetcher.direct_io else set()
            assert direct == wanted, f"direct_io is {fetcher.direct_io}, and {len(direct)} files are open with O_DIRECT"

    def test_counts(self, tmp_path: Path) -> None:
        table = _table("one extent", tmp_path)
        with self._open(table) as fetcher:
            plan = table.plan(fetcher, np.arange(0, len(table.content), 11)).reads
            buffer = _Guarded(plan.buffer_bytes, fetcher.alignment, _POISONS[0]).lent
            stats = fetcher.read(plan, buffer)
            assert isinstance(stats, ReadStats)
            assert min(stats.reads, stats.bytes_read, stats.resumed, stats.service_s) >= 0
            if not isinstance(fetcher, RowFetcher):
                assert stats.reads >= 1
                assert stats.bytes_read >= int(plan.needed.sum())

    def _open(self, table: MadeTable) -> Fetcher:
        return self.make(table.extents, table.row_bytes)

    def _in_child(self, check: Callable[[], None]) -> None:
        run_in_child(check, limit_s=self.child_limit_s)


def _table(layout: str, folder: Path) -> MadeTable:
    row_bytes, places = _LAYOUTS[layout]
    return write_rows(folder, row_bytes, places)


def _check_read(fetcher: Fetcher, table: MadeTable, ids: Int64, landed: Landed | None = None) -> None:
    """Read rows `ids`, ascending and distinct, and compare every byte that a window must have."""
    plan = table.plan(fetcher, ids)
    for poison in _POISONS:
        guarded = _Guarded(plan.reads.buffer_bytes, fetcher.alignment, poison)
        buffer = guarded.lent
        fetcher.read(plan.reads, buffer, landed)
        guarded.check()
        _check_windows(fetcher, plan.reads, buffer, range(len(plan.reads)))
        rows = buffer[plan.position[:, None] + np.arange(table.row_bytes)]
        assert_array_equal(rows, table.content[ids])


def _check_windows(fetcher: Fetcher, plan: ReadPlan, buffer: Bytes, windows: range) -> None:
    """Compare windows with what reading them one at a time gives."""
    for window in windows:
        needed, dest = int(plan.needed[window]), int(plan.dest[window])
        expected = os.pread(fetcher.files.descriptors[plan.file[window]], needed, int(plan.offset[window]))
        assert buffer[dest : dest + needed].tobytes() == expected, f"window {window} at {plan.offset[window]} is wrong"


def _check_truncated(fetcher: Fetcher, table: MadeTable, ids: Int64, cut: str) -> None:
    plan = table.plan(fetcher, ids)
    guarded = _Guarded(plan.reads.buffer_bytes, fetcher.alignment, _POISONS[0])
    buffer = guarded.lent
    error: ReadError | None = None
    try:
        fetcher.read(plan.reads, buffer)
    except ReadError as raised:
        error = raised
    if error is None:
        rows = buffer[plan.position[:, None] + np.arange(table.row_bytes)]
        assert_array_equal(rows, table.content[ids])
        return
    buffer[:] = _POISONS[0]
    assert error.path == cut
    assert error.offset >= 0
    assert error.got is not None
    assert 0 <= error.got < error.wanted
    time.sleep(0.05)
    assert (buffer == _POISONS[0]).all(), "a read was still in flight after the error"
    guarded.check()


def _descriptors() -> set[tuple[int, str]]:
    """Open descriptors of this process, and what they stand for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def _is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)
