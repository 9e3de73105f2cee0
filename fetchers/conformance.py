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
import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lazyio.errors import ReadError, TableError
from lazyio.fetchers.base import Alignment, Bytes, Extent, Fetcher, Int64, Landed, ReadPlan, ReadStats, RowFetcher
from lazyio.fetchers.trial import Guarded, MadeTable, run_in_child, write_rows

__all__ = ["FetcherConformance", "MadeTable", "run_in_child", "write_rows"]

_POISONS = (0x5A, 0xA5)  # a byte that nobody wrote differs from what it should be under one of them at least
_THREADS = 8

# Name of a layout: bytes of a row, and the file, offset and rows of each extent. Files end with their last row.
_LAYOUTS: dict[str, tuple[int, list[tuple[str, int, int]]]] = {
    "one extent": (90, [("a", 77, 1500)]),
    "one byte a row": (1, [("a", 5, 3000)]),
    "rows longer than an OS page": (5040, [("a", 4099, 40)]),
    "several extents and files": (90, [("a", 131, 400), ("b", 3, 350), ("a", 36188, 300), ("c", 0, 1)]),
    "beyond 4 GiB": (82, [("a", (1 << 32) + 7, 200), ("a", (5 << 30) + 513, 300)]),
}


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

    # --- begun now, finished later -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_begun_reads_bring_the_same(self, layout: str, tmp_path: Path) -> None:
        table = _table(layout, tmp_path)
        with self._open(table) as fetcher:
            for ids in (np.arange(0), np.array([1]), np.arange(0, len(table.content), 3)):
                for poison in _POISONS:
                    _Begun(fetcher, table, ids, poison).finish()

    def test_other_reads_come_between(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table) as fetcher:
            first = _Begun(fetcher, table, np.arange(0, len(table.content), 60), _POISONS[0])
            _check_read(fetcher, table, np.arange(0, len(table.content), 7))
            second = _Begun(fetcher, table, np.arange(5, len(table.content), 90), _POISONS[1])
            third = _Begun(fetcher, table, np.arange(9, len(table.content), 300), _POISONS[0])
            for begun in (third, first):
                begun.finish()
                _check_read(fetcher, table, np.arange(1, len(table.content), 50))
            second.finish()

    def test_begun_reads_may_be_forgotten(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        ids = np.arange(0, len(table.content), 40)
        guarded: list[Guarded] = []
        with self._open(table) as fetcher:
            for _ in range(3):
                guarded.append(_Begun(fetcher, table, ids, _POISONS[0]).guarded)
                _check_read(fetcher, table, ids)
            with ThreadPoolExecutor(1) as pool:
                guarded.append(pool.submit(lambda: _Begun(fetcher, table, ids, _POISONS[0]).guarded).result())
            guarded.append(_Begun(fetcher, table, ids, _POISONS[0]).guarded)
        gc.collect()
        for each in guarded:
            each.lent[:] = _POISONS[1]
        time.sleep(0.02)
        for each in guarded:
            assert (each.lent == _POISONS[1]).all(), "a forgotten read was still in flight after the fetcher was closed"

    def test_a_child_comes_between(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        ids = np.arange(0, len(table.content), 60)
        with self._open(table) as fetcher:
            begun = _Begun(fetcher, table, ids, _POISONS[0])

            def check() -> None:
                _check_read(fetcher, table, ids)
                _Begun(fetcher, table, ids, _POISONS[1]).finish()

            self._in_child(check)
            begun.finish()

    def test_expected_rows_are_taken(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table) as fetcher:
            if not isinstance(fetcher, RowFetcher):
                pytest.skip("its rows do not lie in addressable memory")
            ids = np.random.default_rng(3).integers(0, len(table.content), 300)
            assert isinstance(fetcher.expect(ids), ReadStats)
            out = np.empty((len(ids), table.row_bytes), np.uint8)
            fetcher.take(ids, out)
            assert_array_equal(out, table.content[ids])

    # --- progress and failure ----------------------------------------------------------------------------------------

    def test_landed_is_truthful_and_only_grows(self, tmp_path: Path) -> None:
        table = _table("several extents and files", tmp_path)
        with self._open(table) as fetcher:
            plan = table.plan(fetcher, np.arange(0, len(table.content), 2)).reads
            buffer = Guarded(plan.buffer_bytes, fetcher.alignment, _POISONS[0]).lent
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
            self._in_child(lambda: _check_truncated(fetcher, table, ids, str(cut), fetcher.read))
            self._in_child(
                lambda: _check_truncated(
                    fetcher, table, ids, str(cut), lambda plan, buffer: fetcher.begin(plan, buffer).finish()
                )
            )

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
            buffer = Guarded(plan.buffer_bytes, fetcher.alignment, _POISONS[0]).lent
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


class _Begun:
    """Rows `ids` on their way to a guarded buffer."""

    def __init__(self, fetcher: Fetcher, table: MadeTable, ids: Int64, poison: int) -> None:
        self._fetcher, self._expected, self._plan = fetcher, table.content[ids], table.plan(fetcher, ids)
        self.guarded = Guarded(self._plan.reads.buffer_bytes, fetcher.alignment, poison)
        self._pending = fetcher.begin(self._plan.reads, self.guarded.lent)

    def finish(self) -> None:
        stats = self._pending.finish()
        assert isinstance(stats, ReadStats)
        plan, buffer = self._plan, self.guarded.lent
        if len(plan.reads) and not isinstance(self._fetcher, RowFetcher):
            assert stats.reads >= 1
            assert stats.bytes_read >= int(plan.reads.needed.sum())
        self.guarded.check()
        _check_windows(self._fetcher, plan.reads, buffer, range(len(plan.reads)))
        assert_array_equal(buffer[plan.position[:, None] + np.arange(self._expected.shape[1])], self._expected)


def _check_read(fetcher: Fetcher, table: MadeTable, ids: Int64, landed: Landed | None = None) -> None:
    """Read rows `ids`, ascending and distinct, and compare every byte that a window must have."""
    plan = table.plan(fetcher, ids)
    for poison in _POISONS:
        guarded = Guarded(plan.reads.buffer_bytes, fetcher.alignment, poison)
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


def _check_truncated(
    fetcher: Fetcher, table: MadeTable, ids: Int64, cut: str, read: Callable[[ReadPlan, Bytes], ReadStats]
) -> None:
    plan = table.plan(fetcher, ids)
    guarded = Guarded(plan.reads.buffer_bytes, fetcher.alignment, _POISONS[0])
    buffer = guarded.lent
    error: ReadError | None = None
    try:
        read(plan.reads, buffer)
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
