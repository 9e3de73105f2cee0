import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lazyio.interrupts import Terminated, as_interrupts, terminable


def interrupt_without(lock: threading.RLock) -> None:
    lock.release()
    raise KeyboardInterrupt


def test_an_interrupt_that_takes_a_wait_its_lock_is_an_interrupt() -> None:
    lock = threading.RLock()
    with pytest.raises(KeyboardInterrupt), as_interrupts(), lock:
        interrupt_without(lock)


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="of its own"), as_interrupts():
        raise RuntimeError("of its own")


def test_sigterm_is_taken_like_an_interrupt_within_it_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert issubclass(Terminated, KeyboardInterrupt)


def test_another_thread_changes_nothing() -> None:
    def handler() -> object:
        with terminable():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler).result() is signal.getsignal(signal.SIGTERM)
