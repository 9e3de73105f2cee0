import threading

import pytest

from lazyio.interrupts import as_interrupts


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
