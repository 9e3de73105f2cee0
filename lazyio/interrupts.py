"""Interrupts that come to a thread while it waits for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
