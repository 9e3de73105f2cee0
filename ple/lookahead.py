"""Ubatch after ubatch, with the rows of the next ones on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from lazyio.errors import SettingError
from lazyio.fetchers.base import Bytes, Int64

if TYPE_CHECKING:
    from lazyio.prefetch import Ticket
    from lazyio.table import LazyTable


class Cancellable(Protocol):
    """Rows on their way: a ticket, or what stands for one."""

    def cancel(self) -> None:
        """Give them up, without waiting."""
        ...


T = TypeVar("T", bound=Cancellable)


class Ahead(Iterator[T], Generic[T]):
    """Iterates over what `ask` gives for each ubatch, in order, and waits for nothing.

    `ask(ids)` has been called for the next `depth` of them from the moment this is made. What it, or making a ubatch,
    raises is raised at its turn, and ends the iteration. The ones behind the current may take rows from it, so it is
    kept until the next is. `close`, or the end of a with block, cancels what is in flight, as does forgetting this.
    Raises SettingError for a depth below 1.
    """

    def __init__(self, ask: Callable[[Any], T], ubatches: Iterable[Any], *, depth: int) -> None:
        if depth < 1:
            raise SettingError(f"depth is {depth}; at least 1 ubatch must be read ahead")
        self._ask, self._ubatches, self._depth = ask, iter(ubatches), depth
        self._in_flight: deque[T | Exception] = deque()
        self._ended = False
        self._current: T | None = None
        self._look_ahead()

    def __next__(self) -> T:
        if not self._in_flight:
            raise StopIteration
        ahead = self._in_flight.popleft()
        if isinstance(ahead, Exception):
            raise ahead
        self._look_ahead()
        self._current = ahead
        return ahead

    @property
    def upcoming(self) -> T | None:
        """What comes next, if it is on its way."""
        ahead = self._in_flight[0] if self._in_flight else None
        return None if isinstance(ahead, Exception) else ahead

    def close(self) -> None:
        """Cancel what is in flight; nothing more will come. Never waits."""
        self._ended = True
        for ahead in self._in_flight:
            if not isinstance(ahead, Exception):
                ahead.cancel()
        self._in_flight.clear()
        self._current = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_ahead(self) -> None:
        while not self._ended and len(self._in_flight) < self._depth:
            try:
                self._in_flight.append(self._ask(next(self._ubatches)))
            except StopIteration:
                self._ended = True
            except Exception as error:  # at its turn: the rows before it are good
                self._in_flight.append(error)
                self._ended = True


class Lookahead(Iterator[tuple[Bytes, Int64]]):
    """Iterates over the rows and inverses of ubatches, in order, as `Ticket.result` gives them.

    `ubatches` are the row ids of each, as for `gather`, and may be made on the way. The next `depth` of them are being
    read or queued from the moment this is made, and still are while the caller computes. Rows that one of those, or the
    ubatch that the caller has, brings along are not read again. What is wrong with a ubatch is raised at its turn, and
    ends the iteration. Leaving early is free: `close`, or the end of a with block, cancels what is in flight, as does
    forgetting this. Raises SettingError for a depth below 1.
    """

    def __init__(self, table: LazyTable, ubatches: Iterable[Any], *, depth: int = 2) -> None:
        self._tickets: Ahead[Ticket] = Ahead(table.prefetch, ubatches, depth=depth)

    def __next__(self) -> tuple[Bytes, Int64]:
        return next(self._tickets).result()

    def close(self) -> None:
        """Cancel what is in flight; nothing more will come. Never waits."""
        self._tickets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
