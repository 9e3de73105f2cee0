import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lazyio import TableError
from lazyio.fetchers import ReadStats
from lazyio.fetchers.conformance import run_in_child
from lazyio.gate import Gate, Gather, TableStats


def test_what_gathers_did_is_summed_up() -> None:
    gate = Gate()
    for rows in (3, 5):
        with gate.turn, Gather(gate, rows) as stats:
            stats.add(ReadStats(reads=2, bytes_read=100, resumed=1, service_s=0.5))
            stats.unique_rows = 2
    total = gate.stats
    assert (total.gathers, total.rows, total.unique_rows) == (2, 8, 4)
    assert (total.reads, total.bytes_read, total.resumed, total.service_s) == (4, 200, 2, 1.0)
    assert total.wall_s > 0


def test_stats_add_and_subtract_every_field() -> None:
    names = list(TableStats.__dataclass_fields__)
    total = TableStats(**{name: number for number, name in enumerate(names, 1)})
    total.add(TableStats(**{name: 10 * number for number, name in enumerate(names, 1)}))
    assert [getattr(total, name) for name in names] == [11 * number for number in range(1, len(names) + 1)]
    difference = total - TableStats(**{name: number for number, name in enumerate(names, 1)})
    assert [getattr(difference, name) for name in names] == [10 * number for number in range(1, len(names) + 1)]


def test_an_error_inside_lets_go_and_is_counted() -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.turn, Gather(gate, 1):
        1 / 0  # noqa: B018 - any error will do
    assert gate.stats.gathers == 1
    assert gate.close()


def test_closing_waits_for_all_and_refuses_more() -> None:
    gate = Gate()
    inside, may_leave = threading.Barrier(4), threading.Event()

    def gather() -> None:
        with gate.turn, Gather(gate, 1):
            inside.wait()
            may_leave.wait()

    with ThreadPoolExecutor(4) as pool:
        gathering = [pool.submit(gather) for _ in range(3)]
        inside.wait()
        closing = pool.submit(gate.close)
        while not gate.closed:
            time.sleep(0.001)
        with pytest.raises(TableError, match="the table is closed"), gate.turn, Gather(gate, 1):
            pytest.fail("it let somebody in")
        assert not closing.done()
        may_leave.set()
        assert closing.result()
    assert all(each.done() for each in gathering)
    assert gate.stats.gathers == 3
    assert not gate.close()


def test_a_child_does_not_wait_for_gathers_of_its_parent() -> None:
    gate = Gate()
    inside, may_leave = threading.Event(), threading.Event()

    def gather() -> None:
        with gate.turn, Gather(gate, 1):
            inside.set()
            may_leave.wait()

    thread = threading.Thread(target=gather)
    thread.start()
    inside.wait()
    run_in_child(gate.close, limit_s=5)
    may_leave.set()
    thread.join()
    assert gate.close()


def test_a_child_does_not_wait_for_a_lock_that_its_parent_held() -> None:
    gate = Gate()

    def check() -> None:
        with gate.turn, Gather(gate, 1):
            pass

    with gate.lock:
        run_in_child(check, limit_s=5)


def test_a_gather_that_is_cut_off_at_its_end_keeps_nobody_waiting() -> None:
    """Ctrl-C at the first step of leaving: the exception, and with it every frame, is still about when it is closed."""

    class CutOff(Gather):
        def __exit__(self, *_: object) -> None:
            raise KeyboardInterrupt

    gate = Gate()
    try:
        with gate.turn, CutOff(gate, 1):
            pass
    except KeyboardInterrupt:
        closed = ThreadPoolExecutor(1).submit(gate.close)
        assert closed.result(5)


def test_closing_again_after_an_interrupted_close_frees_things() -> None:
    gate = Gate()
    inside, may_leave = threading.Event(), threading.Event()

    def gather() -> None:
        with gate.turn, Gather(gate, 1):
            inside.set()
            may_leave.wait()

    def interrupt() -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(gather)
        inside.wait()
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            gate.close()
        may_leave.set()
        assert gate.close()
    assert not gate.close()


def test_a_signal_handler_can_not_close_under_a_gather() -> None:
    gate = Gate()
    with gate.turn, Gather(gate, 1), pytest.raises(TableError, match="in the middle of a gather of the same thread"):
        gate.close()
    assert gate.close()
