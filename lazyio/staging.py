"""Memory that reads land in: anonymous, page-aligned, bounded, leased and used again."""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from typing import Self

import numpy as np

from lazyio.errors import NeverFits
from lazyio.fetchers.base import Bytes
from lazyio.forking import renew_in_child
from lazyio.interrupts import as_interrupts
from lazyio.units import format_bytes

# An interrupt can cut a lease off between any two steps, so that nobody says that it has ended: whoever waits for one
# looks again after so long.
_LOOK_AGAIN_S = 0.05
_STEP_BYTES = 1 << 20  # areas are whole multiples, so that leases of about one size share them

# What a child inherits of its parent's areas is not mapped there (MADV_DONTFORK), and must never be unmapped either:
# by then something else may lie at those addresses.
_abandoned: list[object] = []


class Area(mmap.mmap):
    """One private anonymous map, kept out of children so that a read in flight never meets a copied page.

    It lives as long as anything refers to its memory.
    """

    def __new__(cls, size: int) -> Self:
        """Map `size` bytes."""
        area = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_DONTFORK)
        return area

    @property
    def bytes(self) -> Bytes:
        """Its memory, uint8."""
        return np.frombuffer(self, np.uint8)


class Staging:
    """Areas of at most `budget_bytes` together. A lease that would exceed them waits for others to end."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._begin()
        renew_in_child(self)

    def lease(self, size: int) -> _Lease:
        """Lend uint8 [size], page-aligned, for the length of a with block, with whatever bytes it held before.

        Raises NeverFits where `size` exceeds the budget.
        """
        return _Lease(self, size)

    def held_bytes(self) -> int:
        """Bytes of all areas, lent or not."""
        with self._lock:
            return self._held()

    def close(self) -> None:
        """Give back what is not lent."""
        with self._lock:
            self._free.clear()

    def give_back(self, area: Area) -> None:
        """End a lease."""
        with self._lock:
            if area in self._lent:  # not so in a child that was forked during the lease
                self._lent.discard(area)
                bisect.insort(self._free, area, key=lambda free: len(free))
                self._changed.notify_all()

    def lend_now(self, size: int) -> Area | None:
        """Lend an area of at least `size` bytes if there is room, and None if not; `give_back` ends that.

        One that is forgotten is freed.
        """
        if size > self.budget_bytes:
            return None
        with self._lock:
            return self._lend(min(self._rounded(size), self.budget_bytes))

    def take(self, size: int) -> Area:
        """Begin a lease, when there is room."""
        rounded = self._rounded(size)
        if size > self.budget_bytes:
            needs, has = format_bytes(rounded), format_bytes(self.budget_bytes)
            raise NeverFits(f"a read needs {needs} of staging and the budget has {has} for that: raise budget")
        with as_interrupts(), self._lock:
            while (area := self._lend(min(rounded, self.budget_bytes))) is None:
                self._changed.wait(_LOOK_AGAIN_S)
            return area

    def _rounded(self, size: int) -> int:
        return -(-max(size, 1) // _STEP_BYTES) * _STEP_BYTES

    def _lend(self, size: int) -> Area | None:
        """An area that is free or, within the budget, a new one; the lock is held."""
        area = next((area for area in self._free if size <= len(area)), None)
        if area is not None:
            self._free.remove(area)
        else:
            while self._free and self._held() + size > self.budget_bytes:
                self._free.pop(0)
            if self._held() + size > self.budget_bytes:
                return None
            area = Area(size)
        self._lent.add(area)
        return area

    def _held(self) -> int:
        return sum(len(area) for area in (*self._free, *self._lent))

    def renew(self) -> None:
        """Start empty in a child process, leaving the parent's areas alone."""
        _abandoned.extend((*self._free, *self._lent))
        self._begin()

    def _begin(self) -> None:
        # Taken as it is, never through the condition: an interrupt inside its methods could leave it taken for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._free: list[Area] = []  # smallest first
        # Weakly: an area whose lease an interrupt cut off, or that was forgotten, goes with what refers to its memory.
        self._lent: weakref.WeakSet[Area] = weakref.WeakSet()


class _Lease:
    """The with block of a lease."""

    __slots__ = ("_area", "_size", "_staging")

    def __init__(self, staging: Staging, size: int) -> None:
        self._staging = staging
        self._size = size

    def __enter__(self) -> Bytes:
        self._area = self._staging.take(self._size)
        return self._area.bytes[: self._size]

    def __exit__(self, *_: object) -> None:
        self._staging.give_back(self._area)
