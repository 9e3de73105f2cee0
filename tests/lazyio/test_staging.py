import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio import NeverFits
from lazyio.fetchers.conformance import run_in_child
from lazyio.staging import Staging

MIB = 1 << 20


def test_a_lease_is_as_long_as_asked_and_starts_at_an_os_page() -> None:
    staging = Staging(4 * MIB)
    for size in (1, 90, 4097, MIB, 3 * MIB + 1):
        with staging.lease(size) as area:
            assert area.shape == (size,)
            assert area.ctypes.data % 4096 == 0
            area[:] = 7


def test_what_was_given_back_is_lent_again() -> None:
    staging = Staging(8 * MIB)
    with staging.lease(2 * MIB) as area:
        address = area.ctypes.data
    with staging.lease(2 * MIB - 5) as area:
        assert area.ctypes.data == address
    assert staging.held_bytes() == 2 * MIB


def test_the_smallest_area_that_fits_is_taken() -> None:
    staging = Staging(8 * MIB)
    with staging.lease(3 * MIB) as large, staging.lease(MIB) as small:
        addresses = large.ctypes.data, small.ctypes.data
    with staging.lease(90) as small, staging.lease(90) as large:
        assert (large.ctypes.data, small.ctypes.data) == addresses


def test_areas_that_are_too_small_make_room() -> None:
    staging = Staging(4 * MIB)
    with staging.lease(2 * MIB), staging.lease(2 * MIB):
        pass
    with staging.lease(3 * MIB):
        assert staging.held_bytes() <= 4 * MIB


def test_what_can_never_fit_is_refused_at_once_with_the_setting() -> None:
    staging = Staging(2 * MIB)
    with pytest.raises(
        NeverFits, match=r"needs 3\.0 MiB of staging and the budget has 2\.0 MiB for that: raise budget"
    ):
        staging.lease(2 * MIB + 1).__enter__()
    assert staging.held_bytes() == 0


def test_a_lease_waits_for_room() -> None:
    staging = Staging(2 * MIB)
    with ThreadPoolExecutor(1) as pool:

        def second() -> int:
            with staging.lease(2 * MIB) as area:
                return len(area)

        with staging.lease(MIB):
            waiting = pool.submit(second)
            time.sleep(0.02)
            assert not waiting.done()
        assert waiting.result() == 2 * MIB
    assert staging.held_bytes() <= 2 * MIB


def test_an_interrupt_that_takes_a_wait_its_lock_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(MIB)

    def interrupted(_: object) -> None:
        staging._lock.release()
        raise KeyboardInterrupt

    with staging.lease(MIB), monkeypatch.context() as patch:
        patch.setattr(staging._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), staging.lease(MIB):
            pass
    with staging.lease(MIB):
        pass


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5 * MIB)), max_size=25))
def test_the_budget_holds_whatever_is_leased_and_in_which_order(steps: list[tuple[int, int]]) -> None:
    budget = 20 * MIB
    staging = Staging(budget)
    held = {}
    for slot, size in steps:
        if slot in held:
            lease, area, mark = held.pop(slot)
            assert (area == mark).all(), "two leases shared memory"
            lease.__exit__(None, None, None)
        else:
            lease = staging.lease(size)
            area = lease.__enter__()
            area[:] = slot
            held[slot] = lease, area, slot
        assert sum(len(area) for _, area, _ in held.values()) <= staging.held_bytes() <= budget
    for lease, *_ in held.values():
        lease.__exit__(None, None, None)


def test_many_threads_never_hold_more_than_the_budget() -> None:
    staging = Staging(3 * MIB)
    failures = []

    def work(number: int) -> None:
        for _ in range(20):
            with staging.lease(MIB) as area:
                area[:100] = number
                if staging.held_bytes() > 3 * MIB:
                    failures.append(number)
                time.sleep(0.0005)
                if (area[:100] != number).any():
                    failures.append(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert failures == []


def test_an_error_inside_a_lease_ends_it() -> None:
    staging = Staging(MIB)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), staging.lease(MIB):
            1 / 0  # noqa: B018 - any error will do


def test_closing_gives_back_what_is_not_lent() -> None:
    staging = Staging(4 * MIB)
    with staging.lease(MIB):
        with staging.lease(2 * MIB):
            pass
        staging.close()
        assert staging.held_bytes() == MIB


def test_areas_are_not_mapped_in_children() -> None:
    """A child that wrote to a page would leave the parent's reads in flight with another copy of it."""
    staging = Staging(4 * MIB)
    with staging.lease(MIB) as area:
        begins = f"{area.ctypes.data:x}-"
        assert begins in Path("/proc/self/maps").read_text()

        def check() -> None:
            assert begins not in Path("/proc/self/maps").read_text()

        run_in_child(check)


def test_a_child_starts_empty_and_ends_its_parents_leases_without_harm() -> None:
    staging = Staging(2 * MIB)
    with staging.lease(2 * MIB):

        def check() -> None:
            assert staging.held_bytes() == 0
            with staging.lease(2 * MIB) as area:
                area[:] = 1
            staging.close()
            assert staging.held_bytes() == 0

        run_in_child(check)
        assert staging.held_bytes() == 2 * MIB


def test_a_lease_that_spans_the_fork_ends_in_both() -> None:
    staging = Staging(2 * MIB)

    def check() -> None:
        lease.__exit__(None, None, None)
        with staging.lease(2 * MIB) as area:
            area[:] = 1

    lease = staging.lease(MIB)
    lease.__enter__()
    run_in_child(check)
    lease.__exit__(None, None, None)
    with staging.lease(2 * MIB) as area:
        area[:] = 1


def test_the_end_of_an_inherited_lease_unmaps_nothing() -> None:
    """By then, something else may lie at those addresses in the child."""
    staging = Staging(2 * MIB)
    lease = staging.lease(MIB)
    area = lease.__enter__()
    address = area.ctypes.data

    def check() -> None:
        nonlocal lease, area
        readable_and_writeable, private_anonymous_here = 0x3, 0x100022
        place, size, offset = ctypes.c_void_p(address), ctypes.c_size_t(MIB), ctypes.c_long(0)
        ctypes.CDLL(None).mmap(place, size, readable_and_writeable, private_anonymous_here, -1, offset)
        ctypes.memset(address, 7, MIB)
        lease.__exit__(None, None, None)
        del lease, area
        gc.collect()
        ctypes.memset(address, 8, MIB)

    run_in_child(check)
    lease.__exit__(None, None, None)


def test_a_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_held() -> None:
    staging = Staging(MIB)
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with staging._changed:
            locked.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()

    def check() -> None:
        with staging.lease(MIB):
            pass

    run_in_child(check, limit_s=5)
    done.set()
    thread.join()
