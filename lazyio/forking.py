"""Starting afresh in a forked child: what other threads held at the fork would stay held there for ever."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something with locks, or with memory that a child does not inherit."""

    def renew(self) -> None:
        """Forget everything that belongs to the parent and its threads."""
        ...


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_child(thing: Renewable) -> None:
    """Have `thing.renew()` called in every child forked from now on, as long as it lives."""
    _renewables.add(thing)


def _renew_all() -> None:
    for thing in list(_renewables):
        thing.renew()


os.register_at_fork(after_in_child=_renew_all)
