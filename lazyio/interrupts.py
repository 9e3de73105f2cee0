"""Interrupts: those that come to a thread while it waits for others, and SIGTERM as one of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM came, and is taken like Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within it, SIGTERM raises Terminated in the main thread; in any other thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> None:
    raise Terminated


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt as what it is, where it has left a wait without its lock, which can't be released then.

    To be put around the with block of the lock: the methods of conditions are Python, so that an interrupt may come
    between any two of their steps.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise
