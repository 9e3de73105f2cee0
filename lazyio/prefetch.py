"""Reading ahead: tickets for rows, and the one thread of a table that reads them."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque

import numpy as np

from lazyio.errors import Cancelled, TableError, Unsupported
from lazyio.fetchers.base import Bytes, Int64
from lazyio.forking import renew_in_child
from lazyio.gate import Gate, Gather
from lazyio.interrupts import as_interrupts
from lazyio.ple.plan import dedup
from lazyio.rows import Rows
from lazyio.staged import CachedRows, as_items

# A thread without work for so long ends, and its ring with it; the next ticket starts another.
_IDLE_S = 5.0
# So many tickets are asked for rows that they have, before the disk is.
_LENDERS = 8
# Beside its bytes a row costs its id and, once for each time that it was asked for, its place.
_INDEX_BYTES = 16


class Ticket:
    """Rows that will be there when they are needed. Made by `LazyTable.prefetch`.

    A ticket that nobody refers to any more is not read. Results may be asked for in any order and from any thread.
    """

    __slots__ = ("__weakref__", "_error", "_ids", "_inverse", "_packed", "_prefetcher", "_shape", "_state")

    def __init__(self, prefetcher: Prefetcher, ids: Int64, shape: tuple[int, ...]) -> None:
        self._prefetcher = prefetcher
        self._ids, self._shape = ids, shape
        self._state = "queued"  # queued | reading | finished
        self._packed, self._inverse = _NOTHING, _NONE
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._state == "finished"

    def result(self) -> tuple[Bytes, Int64]:
        """Wait for the distinct rows by ascending id, uint8 [unique, row_bytes], and the inverse, int64.

        As `LazyTable.gather_unique` gives them, but the rows are read-only: other tickets may copy from them what they
        need. From now on they are the caller's and count no more towards the budget.
        Raises Cancelled where the ticket was cancelled, the table closed or the process forked before it was read, and
        what `gather_unique` raises.
        """
        self._prefetcher.wait_for(self)
        if self._error is not None:
            raise self._error
        return self._packed[1], self._inverse

    def hurry(self) -> None:
        """Have it read with those that are not `patient`, behind the ones that are queued now."""
        self._prefetcher.hurry(self)

    def cancel(self) -> None:
        """Give the rows up. Never waits: a read that is under way is ended by its own thread, and dropped."""
        self._prefetcher.cancel(self)


class Prefetcher:
    """The queue of a table's tickets, and the thread that reads them one after the other.

    Rows that were read and not taken hold at most `limit_bytes`. A ticket that has no room stays in the queue until
    others are taken, cancelled or forgotten. One whose result is waited for is read next and needs no room, since its
    rows leave at once: so no order in which results are taken can lock up, nor a ticket that never has room.
    Rows go to the cache of `cached`, if there is one, when whoever waits for them has them.
    """

    def __init__(
        self, gate: Gate, rows: Rows, row_bytes: int, limit_bytes: int, *, lends: bool, cached: CachedRows | None = None
    ) -> None:
        self._gate, self.rows, self._row_bytes, self._lends, self._cached = gate, rows, row_bytes, lends, cached
        self.limit_bytes = limit_bytes
        # Rows that go to a cache are there twice between their read and that.
        self._most_bytes_per_id = row_bytes * (1 if cached is None else 2) + _INDEX_BYTES
        self.most_ids = limit_bytes // self._most_bytes_per_id  # that have room at once, were all rows distinct
        self._closed = False
        self._begin()
        renew_in_child(self)
        _open.add(self)

    def _begin(self) -> None:
        # Taken as it is, never through the condition, whose methods are Python: an interrupt could come when they have
        # taken the lock and before the with block, and it would be held for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None  # the one that may read
        self._queue: deque[weakref.ref[Ticket]] = deque()
        self._patient: deque[weakref.ref[Ticket]] = deque()  # read when nothing is in the queue
        self._awaited: deque[Ticket] = deque()  # a ticket once for each thread that waits for it
        self._reading: Ticket | None = None
        self._unread: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._lenders: deque[weakref.ref[Ticket]] = deque(maxlen=_LENDERS)

    def submit(self, ids: Int64, shape: tuple[int, ...], *, patient: bool = False) -> Ticket:
        """Queue a ticket for `ids` [n], valid and not to be changed by anyone. A `patient` one lets all others pass.

        Raises TableError after `close`, Unsupported where no thread can be had.
        """
        ticket = Ticket(self, ids, shape)
        with as_interrupts(), self._lock:
            if self._closed:
                raise TableError("the table is closed")
            if self._thread is None:
                self._start_thread()
            (self._patient if patient else self._queue).append(weakref.ref(ticket))
            self._changed.notify_all()
        return ticket

    def hurry(self, ticket: Ticket) -> None:
        """Put a ticket that was patient with the others, if it still waits to be read."""
        with as_interrupts(), self._lock:
            if any(each() is ticket for each in self._patient):
                self._patient = deque(each for each in self._patient if each() is not ticket)
                self._queue.append(weakref.ref(ticket))
                self._changed.notify_all()

    def wait_for(self, ticket: Ticket) -> None:
        """Wait until a ticket is finished; its rows are the caller's then."""
        with as_interrupts(), self._lock:
            if ticket._state == "queued":
                self._awaited.append(ticket)
                self._changed.notify_all()
            try:
                self._changed.wait_for(ticket.done)
            finally:  # an interrupt too ends the wait
                if ticket in self._awaited:
                    self._awaited.remove(ticket)
            self._unread.discard(ticket)
            self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Finish a ticket without rows, unless they were taken."""
        with self._lock:
            if ticket._state != "finished" or ticket in self._unread:
                self._unread.discard(ticket)
                self._finish(ticket, Cancelled("the ticket was cancelled before its rows were taken"))

    def held_bytes(self) -> int:
        """Bytes of rows that were read and not taken."""
        with self._lock:
            return self._held()

    def close(self) -> None:
        """Refuse new tickets, cancel those not begun, and wait for the read under way. Harmless when done twice."""
        with self._lock:
            self._closed = True
            for ticket in self._outstanding():
                if ticket is not self._reading:
                    self._finish(ticket, Cancelled("the table was closed before the rows of this ticket were read"))
            self._queue.clear()
            self._patient.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def renew(self) -> None:
        """Start afresh in a child process, where the thread is not: what it had not read never will be."""
        outstanding, unread, lenders = self._outstanding(), self._unread, self._lenders
        self._begin()
        self._unread, self._lenders = unread, lenders
        why = "the process forked before the rows of this ticket were read: prefetch them again"
        with self._lock:
            for ticket in outstanding:
                self._finish(ticket, Cancelled(why))

    def _outstanding(self) -> list[Ticket]:
        """Tickets that are not finished, some of them twice: those in the queues may be, and are dropped later."""
        queued = [ticket for ticket in (each() for each in (*self._queue, *self._patient)) if ticket is not None]
        known = [*queued, *self._awaited, *([self._reading] if self._reading else [])]
        return [ticket for ticket in known if ticket._state != "finished"]

    def _held(self) -> int:
        return sum(_bytes_of(ticket) for ticket in self._unread)

    def _finish(self, ticket: Ticket, error: BaseException | None) -> None:
        """End a ticket, once; the lock is held."""
        ticket._state, ticket._error = "finished", error
        ticket._ids = _NONE
        if error is not None:
            ticket._packed, ticket._inverse = _NOTHING, _NONE
        self._changed.notify_all()

    def _start_thread(self) -> None:
        try:
            with as_interrupts():
                threading.Thread(target=self._run, name="lazyio prefetch", daemon=True).start()
        except RuntimeError as error:
            raise Unsupported(
                f"no thread can be had to read ahead ({error}): allow more of them (ulimit -u, the pids of a "
                "container), or gather instead; with the engine, set lookahead to 0"
            ) from error

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._lock:
            # A start that was interrupted may have been followed by another.
            if self._closed or self._thread is not None:
                return
            self._thread = threading.current_thread()
        try:
            while (ticket := self._next()) is not None:
                self._serve(ticket)
                del ticket  # or it would live until the next one comes
        except BaseException as error:  # nobody may be left waiting for a thread that is gone
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Hand an error that should not have been to all who wait; the next ticket starts another thread."""
        with self._lock:
            for ticket in self._outstanding():
                self._finish(ticket, error)
            self._thread = self._reading = None

    def _next(self) -> Ticket | None:
        """Wait for a ticket to read; None when the thread is to end."""
        with self._lock:
            while not self._closed:
                ticket = self._first_awaited() or self._first_with_room()
                if ticket is not None:
                    ticket._state = "reading"
                    self._reading = ticket
                    return ticket
                if not self._changed.wait(_IDLE_S) and not (self._queue or self._patient or self._awaited):
                    break
            self._thread = None
            return None

    def _first_awaited(self) -> Ticket | None:
        """The first ticket that a thread waits for and that was neither read nor cancelled since."""
        while self._awaited:
            ticket = self._awaited.popleft()
            if ticket._state == "queued":
                return ticket
        return None

    def _first_with_room(self) -> Ticket | None:
        """The first ticket that anybody wants, patient ones last, if its rows may be held, were they all distinct."""
        for queue in (self._queue, self._patient):
            while queue:
                ticket = queue[0]()
                if ticket is not None and ticket._state == "queued":
                    fits = self._held() + len(ticket._ids) * self._most_bytes_per_id <= self.limit_bytes
                    return queue.popleft()() if fits else None
                queue.popleft()
        return None

    def _serve(self, ticket: Ticket) -> None:
        if self._cached is None:
            self._answer(ticket)
            return
        with self._cached.putting_off() as put_off:
            self._answer(ticket)
        with self._gate.turn:
            if not self._gate.closed:
                self._cached.keep(put_off)

    def _answer(self, ticket: Ticket) -> None:
        error: BaseException | None = None
        try:
            unique, inverse, rows = self._read(ticket._ids)
            inverse = inverse.reshape(ticket._shape)  # fails where it was cancelled before its ids were taken
        except BaseException as raised:  # whatever it is, it is for who asked
            error = raised
        with self._lock:
            self._reading = None
            if ticket._state == "finished":  # cancelled meanwhile
                return
            if error is None:
                ticket._packed, ticket._inverse = (unique, rows), inverse
                self._unread.add(ticket)
                self._lenders.appendleft(weakref.ref(ticket))
            self._finish(ticket, error)

    def _read(self, ids: Int64) -> tuple[Int64, Int64, Bytes]:
        with self._gate.turn, Gather(self._gate, len(ids)) as stats:
            unique, inverse = dedup(ids)
            rows = np.empty((len(unique), self._row_bytes), np.uint8)
            missing = self._borrow(unique, rows) if self._lends else None
            if missing is None:
                stats.unique_rows = len(unique)
                self.rows.read(unique, rows, stats)
            else:
                stats.unique_rows, stats.lent_rows = len(missing), len(unique) - len(missing)
                read = np.empty((len(missing), self._row_bytes), np.uint8)
                self.rows.read(unique[missing], read, stats)
                as_items(rows)[missing] = as_items(read)
        rows.flags.writeable = False
        return unique, inverse, rows

    def _borrow(self, unique: Int64, rows: Bytes) -> Int64 | None:
        """Copy what earlier tickets have; places [n] of the rows that none of them has, or None if that is all."""
        missing: Int64 | None = None
        for lender in filter(None, (each() for each in tuple(self._lenders))):
            has, source = lender._packed
            wanted = unique if missing is None else unique[missing]
            if not len(has) or not len(wanted):
                continue
            place = has.searchsorted(wanted)
            place[place == len(has)] = 0
            found = has[place] == wanted
            if found.any():
                here = np.flatnonzero(found)
                as_items(rows)[here if missing is None else missing[here]] = as_items(source)[place[here]]
                rest = np.flatnonzero(~found)
                missing = rest if missing is None else missing[rest]
        return missing


_NONE: Int64 = np.empty(0, np.int64)
_NOTHING: tuple[Int64, Bytes] = (_NONE, np.empty((0, 0), np.uint8))  # ids ascending, and their rows


def _bytes_of(ticket: Ticket) -> int:
    return ticket._inverse.nbytes + sum(part.nbytes for part in ticket._packed)


# At the end of the interpreter no thread may be left in a read whose memory is about to go.
_open: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _close_all() -> None:
    for prefetcher in list(_open):
        prefetcher.close()


atexit.register(_close_all)
