"""The gate of a table: who is inside, what they did, and waiting for them before it closes."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from lazyio.errors import TableError
from lazyio.fetchers.base import ReadStats
from lazyio.forking import renew_in_child


@dataclass(slots=True)
class TableStats(ReadStats):
    """Counts since a table was opened; subtract two to get what lies between.

    `unique_rows` counts what was left after dedup; a fetcher whose rows lie in addressable memory needs none, and then
    it stays 0; `lent_rows` are those that a ticket took from an earlier one instead. `cache_hits` are ids that the row
    cache had: in a gather they are counted before dedup, in tickets and `gather_unique` after it. `reads` are what the
    fetcher asked of the kernel: read calls, advised ranges of OS pages, or page faults that waited for the device.
    `service_s` sums the time of each read from submission to completion, 0 where the kernel hides it. `wall_s` is time
    inside gathers, summed over threads.
    """

    gathers: int = 0
    rows: int = 0
    unique_rows: int = 0
    lent_rows: int = 0
    cache_hits: int = 0
    wall_s: float = 0.0

    def add(self, other: ReadStats) -> None:
        """Add the counts of `other`, as far as it has them."""
        ReadStats.add(self, other)  # a dataclass with slots is made twice, which super() does not survive
        if isinstance(other, TableStats):
            self.gathers += other.gathers
            self.rows += other.rows
            self.unique_rows += other.unique_rows
            self.lent_rows += other.lent_rows
            self.cache_hits += other.cache_hits
            self.wall_s += other.wall_s

    def __sub__(self, earlier: TableStats) -> TableStats:
        return TableStats(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__})


class Gate:
    """Knows the gathers under way, so that closing can wait for them, and sums up what they did.

    A gather goes `with gate.turn, Gather(gate, rows) as stats`. The turn is a lock of its thread, which no interrupt
    leaves behind: it is taken and given back without a step of Python in between.
    """

    def __init__(self) -> None:
        self.stats = TableStats()
        self.closed = False
        self._passed_on = False
        self.renew()
        renew_in_child(self)

    def renew(self) -> None:
        """Forget the gathers of other threads, which a child does not have."""
        self.lock = threading.Lock()
        self._own = threading.local()
        self._turns: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def turn(self) -> threading.RLock:
        """What the calling thread holds while it gathers."""
        turn: threading.RLock | None = getattr(self._own, "turn", None)
        if turn is None:
            turn = threading.RLock()
            with self.lock:
                self._turns.add(turn)
            self._own.turn = turn
        return turn

    def close(self) -> bool:
        """Refuse new gathers and wait for the rest; whether it is now for the caller to free things, as it is once.

        Raises TableError inside a gather of the same thread, where only a signal handler can call it.
        """
        if self.turn._is_owned():  # type: ignore[attr-defined]
            raise TableError("a table can't be closed in the middle of a gather of the same thread; do it afterwards")
        self.closed = True
        with self.lock:
            turns = list(self._turns)
        for turn in turns:
            with turn:
                pass  # whoever takes it from now on sees that the table is closed
        with self.lock:
            first, self._passed_on = not self._passed_on, True
        return first


class Gather:
    """One gather that has its turn; what it does is counted in the stats that it is entered with."""

    __slots__ = ("_gate", "_started", "_stats")

    def __init__(self, gate: Gate, rows: int, *, gathers: int = 1) -> None:
        self._gate = gate
        self._stats = TableStats(gathers=gathers, rows=rows)

    def __enter__(self) -> TableStats:
        if self._gate.closed:
            raise TableError("the table is closed")
        self._started = time.perf_counter()
        return self._stats

    def __exit__(self, *_: object) -> None:
        gate, stats = self._gate, self._stats
        stats.wall_s = time.perf_counter() - self._started
        with gate.lock:
            gate.stats.add(stats)
