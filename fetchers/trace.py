"""A wrapper that tells of every read that passes through it: when, how long, how much.

`open_table(path, wrap=traced)` puts it around the fetcher of a table, and `table.record(file)` then has the reads too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, TypeAlias

from lazyio.fetchers.base import Bytes, Fetcher, Int64, Landed, Pending, ReadPlan, ReadStats, RowFetcher
from lazyio.fetchers.wrapping import take_after

#: Told of a read that succeeded: when it began (`time.perf_counter`), the seconds it took, its windows (of a RowFetcher
#: its rows), and the bytes they have. Called by whichever thread has read.
Listener: TypeAlias = Callable[[float, float, int, int], None]


def traced(fetcher: Fetcher) -> TracedFetcher | TracedRowFetcher:
    """Put a trace around a fetcher. The result owns the fetcher, and is of its kind."""
    return TracedRowFetcher(fetcher) if isinstance(fetcher, RowFetcher) else TracedFetcher(fetcher)


class TracedFetcher(Fetcher):
    """Any fetcher, with somebody listening; nobody does while `listener` is None."""

    name: ClassVar[str] = "traced"

    def __init__(self, inner: Fetcher) -> None:
        take_after(self, inner)
        self._inner = inner
        self.listener: Listener | None = None

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        """Read the plan; the base class has the contract."""
        began = time.perf_counter()
        stats = self._inner.read(plan, buffer, landed)
        if (listener := self.listener) is not None:
            listener(began, time.perf_counter() - began, len(plan), plan.buffer_bytes)
        return stats

    def begin(self, plan: ReadPlan, buffer: Bytes) -> Pending:
        """Begin to read the plan; the base class has the contract. It is told of when it is finished."""
        began = time.perf_counter()
        return _TracedPending(self, self._inner.begin(plan, buffer), plan, began)

    def close(self) -> None:
        """Close the fetcher below."""
        self._inner.close()


class _TracedPending:
    __slots__ = ("_began", "_inner", "_plan", "_traced")

    def __init__(self, fetcher: TracedFetcher, inner: Pending, plan: ReadPlan, began: float) -> None:
        self._traced, self._inner, self._plan, self._began = fetcher, inner, plan, began

    def finish(self) -> ReadStats:
        stats = self._inner.finish()
        if (listener := self._traced.listener) is not None:
            seconds = time.perf_counter() - self._began
            listener(self._began, seconds, len(self._plan), self._plan.buffer_bytes)
        return stats


class TracedRowFetcher(RowFetcher):
    """The same around a fetcher whose rows lie in addressable memory."""

    name: ClassVar[str] = "traced"

    def __init__(self, inner: RowFetcher) -> None:
        take_after(self, inner)
        self._inner = inner
        self.listener: Listener | None = None

    def expect(self, ids: Int64) -> ReadStats:
        """Pass it on; the base class has the contract."""
        return self._inner.expect(ids)

    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        """Copy rows; the base class has the contract."""
        began = time.perf_counter()
        stats = self._inner.take(ids, out)
        if (listener := self.listener) is not None:
            listener(began, time.perf_counter() - began, len(ids), out.size)
        return stats

    def close(self) -> None:
        """Close the fetcher below."""
        self._inner.close()
