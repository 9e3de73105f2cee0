"""Gathers in two phases: the same rows, whatever comes between the phases."""

import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import LazyTable, ReadError, RowIndexError, TableError, TableSpec, Unsupported, open_table
from lazyio.fetchers import Pending, ReadPlan, ReadStats
from lazyio.fetchers import ring as rings
from lazyio.fetchers.base import Bytes
from lazyio.fetchers.conformance import MadeTable, run_in_child
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.fetchers.faulty_kernel import with_faulty_kernel
from lazyio.fetchers.trace import traced
from lazyio.gate import Gate, TableStats
from lazyio.started import Started

OpenWay = Callable[..., LazyTable]
RANDOM = np.random.default_rng(21)
STEP = np.array([[4200, 7, 7, 2000], [3499, 0, 1999, 7]])


def check(started: Started, made: MadeTable, ids: Any) -> None:
    np.testing.assert_array_equal(started.rows(), made.content[np.asarray(ids, np.int64)])


def right_or_error(started: Started, made: MadeTable, ids: Any) -> ReadError | None:
    try:
        check(started, made, ids)
    except ReadError as error:
        return error
    return None


def outstanding(table: LazyTable, count: int = 5, size: int = 16) -> list[tuple[np.ndarray, Started]]:
    asked = [RANDOM.integers(0, 4201, size) for _ in range(count)]
    return [(ids, table.start(ids)) for ids in asked]


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [STEP, [5], [], 9, np.arange(64), RANDOM.integers(0, 4201, 700)],
    ids=["a step", "one", "none", "scalar", "64", "700"],
)
def test_rows_are_those_of_gather(open_way: OpenWay, spec: TableSpec, made: MadeTable, ids: Any) -> None:
    with open_way(spec) as table:
        for _ in range(2):
            check(table.start(ids), made, ids)


@pytest.mark.parametrize("row_cache", [0, "1MiB"])
def test_rows_come_from_the_cache_and_get_there(spec: TableSpec, made: MadeTable, row_cache: Any) -> None:
    with open_table(spec, mode="on-direct", direct_io="on", row_cache=row_cache) as table:
        table.gather([7, 0])
        before = table.stats()
        check(table.start(STEP), made, STEP)
        check(table.start(STEP), made, STEP)
        did = table.stats() - before
        if row_cache:
            assert (did.gathers, did.rows, did.cache_hits, did.unique_rows) == (2, 16, 4 + 8, 4)
        else:
            assert (did.gathers, did.rows, did.cache_hits, did.unique_rows) == (2, 16, 0, 12)


@pytest.mark.parametrize("budget", [64 << 20, 1 << 20])
@pytest.mark.parametrize("size", [16, 1000])
def test_many_at_once_on_one_thread_in_any_order(
    open_way: OpenWay, spec: TableSpec, made: MadeTable, budget: int, size: int
) -> None:
    """Also more than the budget has room for: none waits for another that only its own thread can end."""
    with open_way(spec, **({"budget": budget} if open_way_takes_budget(open_way, spec) else {})) as table:
        begun = outstanding(table, 12, size)
        np.testing.assert_array_equal(table.gather(STEP), made.content[STEP])
        for ids, started in [*begun[::2], *reversed(begun[1::2])]:
            check(started, made, ids)
            np.testing.assert_array_equal(table.gather(ids[::-1]), made.content[ids[::-1]])
        assert table._started.held_bytes() <= budget // 16


def open_way_takes_budget(open_way: OpenWay, spec: TableSpec) -> bool:
    with open_way(spec) as table:
        return table.backend.fetcher in ("uring", "pread")


def test_the_array_is_the_same_each_time_and_ids_are_copied(double: LazyTable, made: MadeTable) -> None:
    ids = np.array([1, 2, 3])
    started = double.start(ids)
    ids[:] = 9
    assert started.rows() is started.rows()
    check(started, made, [1, 2, 3])


def test_wrong_ids_are_refused_at_once(double: LazyTable) -> None:
    with pytest.raises(RowIndexError, match="row 4201 is outside"):
        double.start([0, 4201])
    with pytest.raises(TypeError):
        double.start([0.5])
    assert double.stats().gathers == 0


# --- early -----------------------------------------------------------------------------------------------------------


def test_reads_are_under_way_before_they_are_waited_for(
    spec: TableSpec, made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both go through a fetcher's own `begin`; what `rows` does is no more than waiting."""
    for mode in ("uring", "on-direct"):
        try:
            table = open_table(spec, mode=mode, direct_io="on", row_cache=0, strict=True)
        except Unsupported as refused:
            pytest.skip(str(refused))
        with table, monkeypatch.context() as patch:
            fetcher: Any = table._fetcher
            patch.setattr(fetcher, "read", lambda *_: pytest.fail("it was read at the end"))
            for _ in range(3):
                started = table.start(STEP)
                if mode == "uring":
                    assert fetcher._ring()._in_flight() >= 4  # neighbours share a read
                check(started, made, STEP)


def test_mapped_rows_are_advised_at_once(spec: TableSpec, made: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_table(spec, mode="on") as table:
        fetcher: Any = table._fetcher
        advised = []
        monkeypatch.setattr(fetcher._adviser, "will_need", lambda *ranges: advised.append(ranges))
        started = table.start([5, 2100])
        assert len(advised) == 1
        check(started, made, [5, 2100])
        assert len(advised) == 1


@pytest.mark.parametrize("arguments", [{"mode": "uring"}, {"mode": "on-direct"}], ids=str)
def test_rows_through_the_page_cache_are_brought_there_at_once(
    spec: TableSpec, made: MadeTable, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_table(spec, direct_io="off", **arguments) as table:
        fetcher: Any = table._fetcher
        begun, begin = [], fetcher.begin
        monkeypatch.setattr(fetcher, "begin", lambda *plan: begun.append(len(plan[0])) or begin(*plan))
        started = table.start([5, 2100])
        assert begun == [2]
        check(started, made, [5, 2100])
        check(table.start([5, 2100]), made, [5, 2100])
        assert begun == [2]
        assert table.stats().reads == 2


def test_the_time_in_between_is_not_counted_as_time_in_gathers(double: LazyTable) -> None:
    started = double.start(STEP)
    time.sleep(0.3)
    started.rows()
    stats = double.stats()
    assert (stats.gathers, stats.rows, stats.reads) == (1, 8, 6)
    assert stats.wall_s < 0.3


# --- other threads, forks --------------------------------------------------------------------------------------------


def test_any_thread_may_ask(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table, ThreadPoolExecutor(4) as pool:
        begun = outstanding(table)
        list(pool.map(lambda pair: check(pair[1], made, pair[0]), begun))
        elsewhere = pool.submit(outstanding, table).result()
        for ids, started in elsewhere:
            check(started, made, ids)
        list(pool.map(lambda number: [check(s, made, i) for i, s in outstanding(table, number)], range(8)))


def test_a_thread_may_end_before_its_reads_do(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table:
        begun: list[tuple[np.ndarray, Started]] = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: begun.extend(outstanding(table, 2)))
            thread.start()
            thread.join()
        for ids, started in begun:
            check(started, made, ids)


def test_a_child_and_its_parent_both_get_the_rows(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table:
        begun = outstanding(table)

        def in_child() -> None:
            for ids, started in begun:
                check(started, made, ids)
            begun.clear()
            gc.collect()
            for ids, started in outstanding(table):
                check(started, made, ids)
            table.close()

        run_in_child(in_child)
        for ids, started in begun:
            check(started, made, ids)


# --- leaving early ---------------------------------------------------------------------------------------------------


def nothing_writes(areas: list[Any]) -> None:
    for area in areas:
        area.bytes[:] = 0x5A
    time.sleep(0.02)
    assert all((area.bytes == 0x5A).all() for area in areas), "a read was still in flight"


def test_the_forgotten_cost_nothing(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table:
        for _ in range(40):
            outstanding(table, 2)
            np.testing.assert_array_equal(table.gather(STEP), made.content[STEP])
        gc.collect()
        assert len(table._started._lent) <= 1, "more than the last, which the ring keeps until it is used again"
        nothing_writes(table._started._free)


@pytest.mark.parametrize("by", ["its thread", "another"])
def test_a_table_may_be_closed_meanwhile(open_way: OpenWay, spec: TableSpec, by: str) -> None:
    table = open_way(spec)
    begun = outstanding(table)
    areas = list(table._started._lent)
    if by == "another":
        thread = threading.Thread(target=table.close)
        thread.start()
        thread.join()
    table.close()
    for _, started in begun:
        with pytest.raises(TableError, match="the table is closed"):
            started.rows()
    with pytest.raises(TableError, match="the table is closed"):
        table.start([1])
    if by == "its thread":
        nothing_writes(areas)


def test_memory_out_of_reach_is_never_freed(spec: TableSpec) -> None:
    """Only its own thread can wait for what is in a ring, and that may go on when another closes it."""
    try:
        table = open_table(spec, mode="uring", direct_io="on", row_cache=0, strict=True)
    except Unsupported as refused:
        pytest.skip(str(refused))
    before = len(rings._out_of_reach)
    started = table.start(STEP)
    thread = threading.Thread(target=table.close)
    thread.start()
    thread.join()
    (left,) = rings._out_of_reach[before:]
    assert left.buffer.base is not None
    del started, rings._out_of_reach[before:]


def test_rows_that_were_had_outlive_the_table(double: LazyTable, made: MadeTable) -> None:
    started = double.start(STEP)
    started.rows()
    double.close()
    check(started, made, STEP)


# --- interrupts ------------------------------------------------------------------------------------------------------

LONG = np.arange(0, 4201, 8)


@pytest.mark.parametrize("phase", ["start", "rows"])
@pytest.mark.parametrize("way", ["on", "on-direct", "on-direct, buffered", "uring", "uring, buffered"])
def test_an_interrupt_at_any_step_leaves_nothing_behind(
    open_way: OpenWay, spec: TableSpec, made: MadeTable, phase: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # one that comes in a destructor is lost
    more = {} if way == "on" else {"row_cache": 0}
    with open_way(spec, **more) as table:
        table.start(STEP).rows()
        for step in range(500):
            interrupted = at_step(step, partial(two_phases, table, phase))
            check(table.start(STEP), made, STEP)
            if not interrupted:
                break
        else:
            pytest.fail("more steps than are looked at")
        np.testing.assert_array_equal(table.gather(LONG), made.content[LONG])
        gc.collect()
        assert not len(table._started._lent)
        nothing_writes(table._started._free)


def two_phases(table: LazyTable, phase: str) -> Callable[[], object]:
    if phase == "start":
        return partial(table.start, STEP)
    return table.start(STEP).rows


def at_step(step: int, prepare: Callable[[], Callable[[], object]]) -> bool:
    """Call what `prepare` returns and interrupt it at its nth step; whether it got that far.

    A step is where the interpreter looks for signals: a call of a function in Python, the return of one in C.
    """
    act, count = prepare(), 0

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal count
        if event in ("call", "c_return") and "lazyio" in frame.f_code.co_filename:
            count += 1
            if count == step + 1:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


def test_signals_while_waiting(
    open_way: OpenWay, spec: TableSpec, made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    armed, raised = False, 0

    def interrupt(*_: object) -> None:
        nonlocal armed, raised
        if armed:
            armed, raised = False, raised + 1
            raise KeyboardInterrupt

    def two_steps() -> None:
        nonlocal armed
        try:
            armed = True
            try:
                for ids, started in outstanding(table, 2):
                    check(started, made, ids)
            finally:
                armed = False
        except KeyboardInterrupt:
            pass

    with open_way(spec) as table:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
        deadline = time.monotonic() + 0.15
        while time.monotonic() < deadline:
            two_steps()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        assert raised
        for ids, started in outstanding(table):
            check(started, made, ids)
        table.gather(LONG)
        gc.collect()
        nothing_writes(table._started._free)


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [with_faults, with_faulty_kernel])
@pytest.mark.parametrize("row_cache", [0, "1MiB"])
@pytest.mark.parametrize("direct_io", ["on", "off"])
@pytest.mark.parametrize("mode", ["uring", "on-direct"])
def test_what_is_transient_is_made_good(
    spec: TableSpec, made: MadeTable, mode: str, direct_io: str, row_cache: Any, where: Callable[..., Any]
) -> None:
    faults = Faults.everywhere(0.15, delay_s=0)
    wrap = partial(where, faults=faults)
    with open_table(spec, mode=mode, direct_io=direct_io, row_cache=row_cache, wrap=wrap) as table:
        resumed = table.stats().resumed
        for _ in range(6):
            for ids, started in outstanding(table, 3):
                check(started, made, ids)
            for ids, started in outstanding(table, 2, 200):
                check(started, made, ids)
        assert table.stats().resumed > resumed


@pytest.mark.parametrize("where", [with_faults, with_faulty_kernel])
@pytest.mark.parametrize("mode", ["uring", "on-direct"])
def test_a_failed_read_is_an_error_and_the_next_is_not(
    spec: TableSpec, made: MadeTable, mode: str, where: Callable[..., Any]
) -> None:
    wrap = partial(where, faults=Faults(eio=0.05, seed=3))
    with open_table(spec, mode=mode, direct_io="on", row_cache=0, wrap=wrap) as table:
        errors = [right_or_error(started, made, ids) for ids, started in outstanding(table, 60)]
        failed = [error.errno for error in errors if error is not None]
        assert set(failed) == {errno.EIO}
        assert 5 < len(failed) < 55
        assert table._started.held_bytes() <= table._started.budget_bytes


def test_asking_again_after_an_error_reads_again(double: LazyTable, made: MadeTable) -> None:
    class Failing:
        def finish(self) -> ReadStats:
            raise ReadError("broken", path="", offset=0, wanted=1, got=0)

    fetcher: Any = double._fetcher
    fetcher.begin = lambda *_: Failing()
    started = double.start(STEP)
    with pytest.raises(ReadError, match="broken"):
        started.rows()
    check(started, made, STEP)


@pytest.fixture
def _written_long_ago(made: MadeTable) -> None:
    for extent in made.extents:
        os.utime(extent.path, ns=(0, 0))


@pytest.mark.usefixtures("_written_long_ago")
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_file_that_is_truncated(
    open_way: OpenWay, way: str, spec: TableSpec, made: MadeTable, tmp_path: Path, when: str
) -> None:
    ids = np.arange(3000, 3400, 9)
    with open_way(spec) as table:

        def in_child() -> None:
            if when == "before":
                os.truncate(tmp_path / "b", 40_000)
            if when == "before" and way not in ("off", "on", "on, safe", "on-bare"):
                with pytest.raises(ReadError, match="b changed after the table was opened"):
                    table.start(ids)
                return
            started = table.start(ids)
            os.truncate(tmp_path / "b", 40_000)
            error = right_or_error(started, made, ids)
            assert error is None or error.path == str(tmp_path / "b")
            assert when == "between" or way == "off" or error is not None

        run_in_child(in_child)


# --- with something around it ----------------------------------------------------------------------------------------


def test_edited_rows_are_served(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec, overlay={7: bytes(90), 4200: bytes([1] * 90)}) as table:
        expected = made.content.copy()
        expected[7], expected[4200] = 0, 1
        np.testing.assert_array_equal(table.start(STEP).rows(), expected[STEP])


def test_rows_are_verified(spec: TableSpec, made: MadeTable, open_double: Callable[..., LazyTable]) -> None:
    with open_table(spec, mode="on-direct", direct_io="on", row_cache=0, verify=50) as table:
        check(table.start(STEP), made, STEP)
        fetcher: Any = table._fetcher
        begin = fetcher.begin

        def spoiled(plan: ReadPlan, buffer: Bytes) -> Pending:
            class Spoils:
                def finish(self) -> ReadStats:
                    stats = begin(plan, buffer).finish()
                    buffer[:] ^= 1
                    return stats

            return Spoils()

        fetcher.begin = spoiled
        with pytest.raises(ReadError, match="was gathered with other bytes"):
            table.start(STEP).rows()


def test_it_is_recorded_and_traced(spec: TableSpec, made: MadeTable, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    with open_table(spec, mode="on-direct", direct_io="on", row_cache=0, wrap=traced) as table, table.record(path):
        started = table.start(STEP)
        time.sleep(0.3)
        check(started, made, STEP)
        check(table.start([3]), made, [3])
    trace = np.load(path)
    np.testing.assert_array_equal(trace["row_ids"], [*STEP.ravel(), 3])
    np.testing.assert_array_equal(trace["lengths"], [8, 1])
    np.testing.assert_array_equal(trace["gathers"]["unique_rows"], [6, 1])
    assert trace["gathers"]["seconds"][0] < 0.3 <= trace["reads"]["seconds"][0]
    np.testing.assert_array_equal(trace["reads"]["windows"], trace["gathers"]["reads"])
    assert trace["gathers"]["reads"][0] >= 4  # neighbours share one


def test_faults_above_rows_in_memory(spec: TableSpec, made: MadeTable) -> None:
    wrap = partial(with_faults, faults=Faults.everywhere(0.2, delay_s=0))
    with open_table(spec, mode="on", wrap=wrap) as table:
        for ids, started in outstanding(table):
            check(started, made, ids)


# --- rows that two threads ask for -----------------------------------------------------------------------------------


class HalfWay:
    """Rows of ones that are zeros half-way through the end of what was started; that fails where `fails` is set."""

    def __init__(self, *, fails: bool = False) -> None:
        self.ending, self.go, self.half_way, self.go_on = (threading.Event() for _ in range(4))
        self._fails = fails

    def gather(self, asked: np.ndarray, rows: Bytes, stats: TableStats) -> None:
        stats.reads += 1
        rows[:] = 1

    read = gather

    def start(self, asked: np.ndarray, stats: TableStats) -> Callable[[Bytes, TableStats], None]:
        def finish(rows: Bytes, stats: TableStats) -> None:
            stats.reads += 10
            if self._fails:
                raise OSError("on purpose")
            self.ending.set()
            assert self.go.wait(10)
            rows[:] = 0
            self.half_way.set()
            assert self.go_on.wait(10)
            rows[:] = 1

        return finish

    def close(self) -> None:
        pass


def test_rows_that_were_given_stay_as_they_are() -> None:
    """Whoever asks before the thread that began has them must not see what that one is still copying."""
    way = HalfWay()
    with ThreadPoolExecutor(1) as other:
        started = other.submit(Started, Gate(), way, np.arange(3), 4).result()
        ending = other.submit(started.rows)
        assert way.ending.wait(10)
        given = started.rows()
        way.go.set()
        assert way.half_way.wait(10)
        assert given.all()
        way.go_on.set()
        assert ending.result().all()
    assert started.rows().all()


def test_what_an_end_that_failed_did_is_counted_once() -> None:
    gate = Gate()
    started = Started(gate, HalfWay(fails=True), np.arange(3), 4)
    with pytest.raises(OSError, match="on purpose"):
        started.rows()
    assert started.rows().all()
    assert gate.stats.reads == 11
    assert gate.stats.gathers == 1
