"""Tickets: rows as gather_unique gives them, whatever happens to the table, its threads and its process meanwhile."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from lazyio import (
    Cancelled,
    LazyTable,
    ReadError,
    RowIndexError,
    TableError,
    TableSpec,
    Unsupported,
    open_table,
    prefetch,
)
from lazyio.fetchers.base import Bytes, Int64
from lazyio.fetchers.conformance import MadeTable, run_in_child
from lazyio.ple.cache import RowCache
from lazyio.prefetch import Ticket

OpenWay = Callable[..., LazyTable]
MIB = 1 << 20
RANDOM = np.random.default_rng(3)
ASKED: list[Any] = [
    [],
    np.empty((0, 3), np.int32),
    5,
    [0, 4200, 0],
    [7] * 3000,
    RANDOM.integers(0, 4201, (13, 7)),
    RANDOM.integers(0, 4201, (3, 4, 5)).T,
    RANDOM.integers(0, 4201, 3000, dtype=np.uint32),
    np.arange(4201)[::-1],
]


def check_result(ticket: Ticket, made: MadeTable, ids: Any) -> None:
    rows, inverse = ticket.result()
    unique, expected = np.unique(np.asarray(ids, np.int64), return_inverse=True)
    np.testing.assert_array_equal(rows, made.content[unique])
    np.testing.assert_array_equal(inverse, expected.reshape(np.shape(ids)))
    assert inverse.dtype == np.int64


def threads_that_read() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lazyio prefetch"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Held:
    """A table whose reads wait until they are let go."""

    def __init__(self, table: LazyTable) -> None:
        self.table = table
        self.fetcher: Any = table._fetcher
        self.fetcher.may_go_on.clear()

    def reading(self) -> None:
        """Wait until a read is under way."""
        assert self.fetcher.reading.wait(30)

    def let_go(self) -> None:
        self.fetcher.may_go_on.set()


@pytest.fixture
def held(double: LazyTable) -> Iterator[Held]:
    held = Held(double)
    yield held
    held.let_go()


# --- turns ----------------------------------------------------------------------------------------------------------


def test_patient_tickets_let_others_pass(held: Held, made: MadeTable) -> None:
    table, order = held.table, list[str]()
    asked = {name: np.arange(first, first + 50) for first, name in enumerate(["first", "patient", "late", "hurried"])}
    serve = table._prefetcher._serve
    tickets: dict[str, Ticket] = {}

    def noted(ticket: Ticket) -> None:
        order.append(next(name for name in tickets if tickets[name] is ticket))
        serve(ticket)

    table._prefetcher._serve = noted  # type: ignore[method-assign]
    for name, patient in (("first", False), ("patient", True), ("hurried", True), ("late", False)):
        tickets[name] = table.prefetch(asked[name], patient=patient)
        if name == "first":
            held.reading()
    tickets["hurried"].hurry()
    tickets["first"].hurry()  # has begun: nothing to hurry
    held.let_go()
    for name, ticket in tickets.items():
        until(ticket.done)
        check_result(ticket, made, asked[name])
    assert order == ["first", "late", "hurried", "patient"]


def test_patient_tickets_are_cancelled_with_the_others(held: Held) -> None:
    running = held.table.prefetch(np.arange(50))
    held.reading()
    patient, cancelled = (held.table.prefetch(np.arange(50, 90), patient=True) for _ in range(2))
    cancelled.cancel()
    closing = threading.Thread(target=held.table.close)
    closing.start()
    until(patient.done)
    held.let_go()
    closing.join()
    assert len(running.result()[0]) == 50
    for ticket in (patient, cancelled):
        with pytest.raises(Cancelled):
            ticket.result()


# --- results ---------------------------------------------------------------------------------------------------------


def test_results_are_those_of_gather_unique(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table:
        tickets = [table.prefetch(ids) for ids in ASKED]
        for ticket, ids in zip(tickets, ASKED, strict=True):
            check_result(ticket, made, ids)
            assert ticket.done()


def test_results_in_any_order_and_more_than_once(double: LazyTable, made: MadeTable) -> None:
    asked = [RANDOM.integers(0, 4201, 500) for _ in range(20)]
    tickets = [double.prefetch(ids) for ids in asked]
    for number in (*RANDOM.permutation(20), 3, 3):
        check_result(tickets[number], made, asked[number])


def test_ids_are_copied_and_rows_are_read_only(held: Held, made: MadeTable) -> None:
    ids = np.arange(100)
    first = held.table.prefetch([1])
    ticket = held.table.prefetch(ids)
    ids[:] = 7
    held.let_go()
    check_result(ticket, made, np.arange(100))
    check_result(first, made, [1])
    assert not ticket.result()[0].flags.writeable


def test_what_is_wrong_with_ids_is_said_at_once(double: LazyTable) -> None:
    with pytest.raises(RowIndexError, match="row 4201 is outside"):
        double.prefetch([0, 4201])
    with pytest.raises(TypeError, match="must be integers"):
        double.prefetch([0.5])
    assert not threads_that_read()


def test_tickets_are_counted_as_gathers(double: LazyTable) -> None:
    double.prefetch([1, 1, 2]).result()
    stats = double.stats()
    assert (stats.gathers, stats.rows, stats.unique_rows, stats.lent_rows) == (1, 3, 2, 0)


def test_threads_take_from_one_table(double: LazyTable, made: MadeTable) -> None:
    def work(seed: int) -> None:
        asked = [np.random.default_rng([seed, turn]).integers(0, 4201, 300) for turn in range(8)]
        tickets = [double.prefetch(ids) for ids in asked]
        for ticket, ids in zip(tickets, asked, strict=True):
            check_result(ticket, made, ids)
            np.testing.assert_array_equal(double.gather(ids), made.content[ids])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(threads_that_read()) == 1


def test_threads_wait_for_one_ticket(held: Held, made: MadeTable) -> None:
    first = held.table.prefetch([1])
    held.reading()
    shared, last = held.table.prefetch(np.arange(200)), held.table.prefetch([300])
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(check_result, shared, made, np.arange(200)) for _ in range(3)]
        until(lambda: len(held.table._prefetcher._awaited) == 3)
        held.let_go()
        for each in waiting:
            each.result(timeout=30)
    for ticket, ids in ((last, [300]), (first, [1])):
        until(ticket.done)
        check_result(ticket, made, ids)
    assert len(held.fetcher.plans) == 3


# --- rows that another ticket has ------------------------------------------------------------------------------------


def test_rows_of_earlier_tickets_are_not_read_again(double: LazyTable, made: MadeTable) -> None:
    asked = [np.arange(0, 2000, 2), np.arange(500, 2500), np.arange(400, 2600), np.arange(600, 700)]
    tickets = [double.prefetch(ids) for ids in asked]
    for ticket, ids in zip(tickets, asked, strict=True):
        check_result(ticket, made, ids)
    stats = double.stats()
    assert stats.unique_rows == len(np.unique(np.concatenate(asked)))
    assert stats.unique_rows + stats.lent_rows == sum(map(len, asked))


def test_rows_of_forgotten_and_cancelled_tickets_are_read(double: LazyTable, made: MadeTable) -> None:
    ids = np.arange(1000)
    double.prefetch(ids).result()
    cancelled = double.prefetch(ids)
    until(cancelled.done)
    cancelled.cancel()
    check_result(double.prefetch(ids), made, ids)
    assert double.stats().lent_rows == 0


def test_copying_from_memory_borrows_nothing(spec: TableSpec, made: MadeTable) -> None:
    from lazyio import open_table

    with open_table(spec, mode="on") as table:
        first = table.prefetch(np.arange(100))
        check_result(first, made, np.arange(100))
        check_result(table.prefetch(np.arange(100)), made, np.arange(100))
        assert table.stats().lent_rows == 0


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_hundred_tickets_and_a_tiny_budget(
    open_double: Callable[..., LazyTable], spec: TableSpec, made: MadeTable
) -> None:
    """Which would need seven times the memory that there is; gathers go on meanwhile."""
    with open_double(spec, budget_bytes=MIB) as table:
        asked = [RANDOM.integers(0, 4201, 250) for _ in range(100)]
        tickets = [table.prefetch(ids) for ids in asked]
        until(lambda: sum(ticket.done() for ticket in tickets) >= 5)
        time.sleep(0.05)
        begun = sum(ticket.done() for ticket in tickets)
        assert begun < 20
        assert table._prefetcher.held_bytes() <= MIB // 4
        np.testing.assert_array_equal(table.gather(asked[99]), made.content[asked[99]])
        for number in (99, 50, *range(50), *range(51, 99)):
            check_result(tickets[number], made, asked[number])
            assert table._prefetcher.held_bytes() <= MIB // 4
        assert table._prefetcher.held_bytes() == 0


@pytest.mark.parametrize("way", ["taken", "cancelled", "forgotten"])
def test_room_is_made(open_double: Callable[..., LazyTable], spec: TableSpec, way: str) -> None:
    with open_double(spec, budget_bytes=MIB) as table:
        first, second = table.prefetch(np.arange(2000)), table.prefetch(np.arange(2000, 4000))
        until(first.done)
        time.sleep(0.02)
        assert not second.done()
        if way == "taken":
            first.result()
        elif way == "cancelled":
            first.cancel()
        else:
            del first
            third = table.prefetch([1])  # whatever happens next wakes the thread
            until(third.done)
        until(second.done)


def test_a_ticket_that_has_no_room_is_read_when_it_is_asked_for(
    open_double: Callable[..., LazyTable], spec: TableSpec, made: MadeTable
) -> None:
    with open_double(spec, budget_bytes=MIB) as table:
        ticket, other = table.prefetch(np.arange(4201)), table.prefetch([1])
        time.sleep(0.02)
        assert not ticket.done()
        check_result(other, made, [1])
        check_result(ticket, made, np.arange(4201))


@pytest.mark.parametrize("cache_bytes", [0, MIB])
def test_what_is_kept_in_the_cache_later_has_room_until_then(
    open_double: Callable[..., LazyTable], spec: TableSpec, made: MadeTable, cache_bytes: int
) -> None:
    """Of 256 KiB for rows read ahead, these take 155 KiB, and twice as many where they must be kept for the cache."""
    asked = np.arange(1500)
    with open_double(spec, budget_bytes=MIB, cache_bytes=cache_bytes) as table:
        ticket, last = table.prefetch(asked), table.prefetch([1])
        until(last.done) if not cache_bytes else time.sleep(0.05)
        assert ticket.done() is (cache_bytes == 0)
        check_result(ticket, made, asked)
        until(last.done)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_ticket_is_cancelled_before_during_and_after_its_read(held: Held, made: MadeTable) -> None:
    during, before, after = (held.table.prefetch([number, 9]) for number in (1, 2, 3))
    held.reading()
    during.cancel()
    before.cancel()
    for ticket in (during, before):
        assert ticket.done()
        with pytest.raises(Cancelled, match="cancelled before its rows were taken"):
            ticket.result()
    held.let_go()
    until(after.done)
    after.cancel()
    with pytest.raises(Cancelled):
        after.result()
    assert [len(plan) for plan in held.fetcher.plans] == [2, 2]
    assert held.table._prefetcher.held_bytes() == 0
    taken = held.table.prefetch([4])
    check_result(taken, made, [4])
    taken.cancel()
    check_result(taken, made, [4])


def test_who_waits_for_a_ticket_learns_that_it_was_cancelled(held: Held) -> None:
    held.table.prefetch([1])
    ticket = held.table.prefetch([2])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ticket.result)
        held.reading()
        ticket.cancel()
        with pytest.raises(Cancelled):
            waiting.result(timeout=30)


def test_a_ticket_that_is_cancelled_while_threads_wait_for_it_is_not_read(held: Held, made: MadeTable) -> None:
    first = held.table.prefetch([1])
    held.reading()
    ticket, last = held.table.prefetch([2, 3]), held.table.prefetch([4])
    prefetcher = held.table._prefetcher
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ticket.result) for _ in range(2)]
        until(lambda: len(prefetcher._awaited) == 2)
        with prefetcher._changed:  # the thread that reads may be the first to see it
            ticket._prefetcher._finish(ticket, Cancelled("cancelled"))
            assert prefetcher._first_awaited() is None
        held.let_go()
        for each in waiting:
            with pytest.raises(Cancelled):
                each.result(timeout=30)
    until(last.done)
    check_result(last, made, [4])
    check_result(first, made, [1])
    assert len(held.fetcher.plans) == 2


def test_an_interrupted_wait_leaves_other_threads_waiting(
    open_double: Callable[..., LazyTable], spec: TableSpec, made: MadeTable
) -> None:
    with open_double(spec, budget_bytes=MIB) as table, ThreadPoolExecutor(1) as pool:
        held = Held(table)
        first, ticket = table.prefetch([1]), table.prefetch(np.arange(4201))  # which has no room
        held.reading()
        prefetcher = table._prefetcher
        other = pool.submit(check_result, ticket, made, np.arange(4201))
        until(lambda: len(prefetcher._awaited) == 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefetcher._changed, "wait_for", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                ticket.result()
        held.let_go()
        other.result(timeout=30)
        check_result(first, made, [1])


def test_an_interrupt_that_takes_a_wait_its_lock_is_an_interrupt(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher = held.table._prefetcher
    ticket = held.table.prefetch([1])

    def interrupted(_: object) -> None:
        prefetcher._lock.release()
        raise KeyboardInterrupt

    monkeypatch.setattr(prefetcher._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ticket.result()
    monkeypatch.undo()
    held.let_go()
    assert len(ticket.result()[0]) == 1


def test_an_interrupt_at_any_step_leaves_no_lock_taken(
    open_double: Callable[..., LazyTable], spec: TableSpec, made: MadeTable
) -> None:
    with open_double(spec, budget_bytes=MIB) as table:
        step = 0
        while interrupted_at(step, lambda: table.prefetch([1, 2]).cancel()):
            changed: Any = table._prefetcher._changed
            if changed._is_owned():
                changed.release()  # or closing the table would wait for ever
                pytest.fail(f"step {step} left the lock taken")
            check_result(table.prefetch([3]), made, [3])
            step += 1
        assert step > 10
    assert all(thread.name != "lazyio prefetch" for thread in threading.enumerate())


def interrupted_at(step: int, act: Callable[[], object]) -> bool:
    """Interrupt it at its nth step, a call of a function in Python or the return of one in C; whether it got there."""
    count = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and (name.endswith("/threading.py") or "lazyio" in name):
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


def test_a_thread_that_fails_leaves_nobody_waiting(
    held: Held, made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = [held.table.prefetch([number]) for number in range(3)]
    held.reading()
    prefetcher = held.table._prefetcher
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(prefetcher, "_first_awaited", Mock(side_effect=MemoryError("no memory")))
        waiting = pool.submit(tickets[2].result)
        until(lambda: len(prefetcher._awaited) == 1)
        held.let_go()
        with pytest.raises(MemoryError, match="no memory"):
            waiting.result(timeout=30)
        with pytest.raises(MemoryError, match="no memory"):
            tickets[1].result()
        until(lambda: not threads_that_read())
    check_result(tickets[0], made, [0])
    check_result(held.table.prefetch([5]), made, [5])


def test_without_a_thread_it_says_so_and_goes_on(
    double: LazyTable, made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unsupported, match=r"no thread can be had .*can't start new thread.*set lookahead to 0"):
            double.prefetch([1])
    check_result(double.prefetch([1]), made, [1])


def test_results_that_were_taken_outlive_closing(
    open_double: Callable[..., LazyTable], spec: TableSpec, made: MadeTable
) -> None:
    """Also where the ticket is still in the queue, behind one that has no room."""
    with open_double(spec, budget_bytes=MIB) as table:
        large, taken = table.prefetch(np.arange(4201)), table.prefetch([2])
        check_result(taken, made, [2])
    check_result(taken, made, [2])
    with pytest.raises(Cancelled, match="the table was closed"):
        large.result()


def test_a_forgotten_ticket_is_not_read(held: Held, made: MadeTable) -> None:
    first = held.table.prefetch([1])
    held.reading()
    held.table.prefetch([2])
    last = held.table.prefetch([3])
    held.let_go()
    check_result(last, made, [3])
    check_result(first, made, [1])
    assert len(held.fetcher.plans) == 2


def test_failures_are_raised_by_the_result(double: LazyTable, made: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    good = double.prefetch([1])
    check_result(good, made, [1])

    def fail(*_: Any) -> None:
        raise ReadError("the disk is gone", path="a", offset=0, wanted=90, got=None)

    with monkeypatch.context() as patch:
        patch.setattr(double._fetcher, "read", fail)
        bad = double.prefetch([2])
        for _ in range(2):
            with pytest.raises(ReadError, match="the disk is gone"):
                bad.result()
    check_result(double.prefetch([2]), made, [2])
    assert not len(double._staging._lent)


def test_closing_waits_for_the_read_and_cancels_the_rest(held: Held, made: MadeTable) -> None:
    reading, queued = held.table.prefetch([1]), held.table.prefetch([2])
    held.reading()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(queued.result)
        until(lambda: len(held.table._prefetcher._awaited) == 1)
        closing = pool.submit(held.table.close)
        with pytest.raises(Cancelled, match="the table was closed before"):
            waiting.result(timeout=30)
        assert not closing.done()
        held.let_go()
        closing.result(timeout=30)
    check_result(reading, made, [1])
    assert not threads_that_read()
    with pytest.raises(TableError, match="the table is closed"):
        held.table.prefetch([1])
    held.table.close()


def test_an_idle_thread_ends_and_the_next_ticket_starts_another(
    double: LazyTable, made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_IDLE_S", 0.01)
    for ids in ([1], [2]):
        check_result(double.prefetch(ids), made, ids)
        until(lambda: not threads_that_read())


def test_a_table_that_is_forgotten_takes_its_thread_along(
    open_double: Callable[..., LazyTable], spec: TableSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_IDLE_S", 0.01)
    table = open_double(spec, budget_bytes=MIB)
    tickets = [table.prefetch(np.arange(start, start + 2000)) for start in (0, 500, 1000)]
    until(tickets[0].done)
    del table, tickets
    gc.collect()
    until(lambda: not threads_that_read())


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_child_has_what_was_read_and_learns_that_the_rest_never_will_be(held: Held, made: MadeTable) -> None:
    held.let_go()
    finished = held.table.prefetch([5, 6])
    until(finished.done)
    held.fetcher.may_go_on.clear()
    held.fetcher.reading.clear()
    reading, queued = held.table.prefetch([1]), held.table.prefetch([2])
    held.reading()

    def check() -> None:
        # The parent's thread may be inside either of them.
        held.fetcher.may_go_on, held.fetcher.reading = threading.Event(), threading.Event()
        held.let_go()
        for ticket in (reading, queued):
            with pytest.raises(Cancelled, match="the process forked before"):
                ticket.result()
        check_result(finished, made, [5, 6])
        check_result(held.table.prefetch([1, 5]), made, [1, 5])
        held.table.close()
        assert not threads_that_read()

    run_in_child(check)
    held.let_go()
    check_result(reading, made, [1])
    check_result(queued, made, [2])


def test_children_of_a_table_that_reads_ahead(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    ids = RANDOM.integers(0, 4201, 1000)
    with open_way(spec) as table:
        for _ in range(3):
            tickets = [table.prefetch(ids) for _ in range(4)]

            def check() -> None:
                check_result(table.prefetch(ids), made, ids)
                table.close()

            run_in_child(check)
            for ticket in tickets:
                check_result(ticket, made, ids)


ENDING = """
import atexit, sys, threading
atexit.register(lambda: print(sum(thread.name == "lazyio prefetch" for thread in threading.enumerate()), "left"))
import numpy as np
from lazyio import open_table, raw_table
table = open_table(raw_table(sys.argv[1], row_bytes=90), mode=sys.argv[2])
tickets = [table.prefetch(np.random.default_rng(n).integers(0, 100_000, 5000)) for n in range(200)]
tickets[0].result()
print("ends")
"""


@pytest.mark.parametrize("mode", ["uring", "on-direct", "on", "off"])
def test_an_interpreter_ends_with_tickets_in_flight(tmp_path: Any, mode: str) -> None:
    path = tmp_path / "rows"
    with path.open("wb") as file:
        file.truncate(90 * 100_000)
    command = [sys.executable, "-W", "error", "-c", ENDING, str(path), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n0 left\n", "")


@pytest.mark.parametrize("closed", [False, True])
def test_rows_are_delivered_before_they_are_kept(
    spec: TableSpec, made: MadeTable, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    asked = np.arange(3000)
    with open_table(spec, mode="uring", direct_io="on", row_cache="1MiB") as table:
        assert table.cache is not None
        insert, may_go_on, inserting = RowCache.insert, threading.Event(), threading.Event()

        def slow(cache: RowCache, ids: Int64, rows: Bytes) -> None:
            inserting.set()
            assert may_go_on.wait(30)
            insert(cache, ids, rows)

        monkeypatch.setattr(RowCache, "insert", slow)
        check_result(table.prefetch(asked), made, asked)
        assert inserting.wait(30)
        closing = threading.Thread(target=table.close)
        if closed:
            closing.start()
        may_go_on.set()
        if closed:
            closing.join()
            return
        until(lambda: table.cache is not None and table.cache.stats().inserted == len(asked))
        check_result(table.prefetch(asked), made, asked)
        until(lambda: table.stats().cache_hits == len(asked))
