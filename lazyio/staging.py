"""Memory that reads land in: anonymous, page-aligned, bounded, leased and used again."""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref

import numpy as np

from lazyio.errors import NeverFits
from lazyio.fetchers.base import Bytes
from lazyio.forking import renew_in_child
from lazyio.units import format_bytes

# An interrupt can cut a lease off between any two steps, so that nobody says that it has ended: whoever waits for one
# looks again after so long.
_LOOK_AGAIN_S = 0.05
_STEP_BYTES = 1 << 20  # areas are whole multiples, so that leases of about one size share them

# What a child inherits of its parent's areas is not mapped there (MADV_DONTFORK), and must never be unmapped either:
# by then something else may lie at those addresses.
_abandoned: list[object] = []


class _Area:
    """One private anonymous map, kept out of children so that a read in flight never meets a copied page."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)


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
        with self._changed:
            return self._held()

    def close(self) -> None:
        """Give back what is not lent."""
        with self._changed:
            self._free.clear()

    def give_back(self, area: _Area) -> None:
        """End a lease."""
        with self._changed:
            if area in self._lent:  # not so in a child that was forked during the lease
                self._lent.discard(area)
                bisect.insort(self._free, area, key=lambda free: len(free.bytes))
                self._changed.notify_all()

    def take(self, size: int) -> _Area:
        """Begin a lease, when there is room."""
        rounded = -(-max(size, 1) // _STEP_BYTES) * _STEP_BYTES
        if size > self.budget_bytes:
            needs, has = format_bytes(rounded), format_bytes(self.budget_bytes)
            raise NeverFits(f"a read needs {needs} of staging and the budget has {has} for that: raise budget")
        rounded = min(rounded, self.budget_bytes)
        with self._changed:
            while True:
                area = next((area for area in self._free if rounded <= len(area.bytes)), None)
                if area is not None:
                    self._free.remove(area)
                    break
                while self._free and self._held() + rounded > self.budget_bytes:
                    self._free.pop(0)
                if self._held() + rounded <= self.budget_bytes:
                    area = _Area(rounded)
                    break
                self._changed.wait(_LOOK_AGAIN_S)
            self._lent.add(area)
            return area

    def _held(self) -> int:
        return sum(len(area.bytes) for area in (*self._free, *self._lent))

    def renew(self) -> None:
        """Start empty in a child process, leaving the parent's areas alone."""
        _abandoned.extend((*self._free, *self._lent))
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._free: list[_Area] = []  # smallest first
        # Weakly: an area whose lease an interrupt cut off goes with the frame that it was lent to.
        self._lent: weakref.WeakSet[_Area] = weakref.WeakSet()


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
