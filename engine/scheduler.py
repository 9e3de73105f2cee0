"""Continuous batching: ubatches of whatever the requests that have a lane need next.

A ubatch has the next token of every reply, and chunks of the prompts that are not done. Requests get their lanes in the
order of their arrival, and wait for them in that order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from lazyio.engine.admission import Admission
from lazyio.engine.batch import Asked, Batch, select
from lazyio.engine.batch_rows import BatchRows
from lazyio.engine.feed import Feed
from lazyio.engine.forward import Forward
from lazyio.engine.planning import Limits, Planned, Planner
from lazyio.engine.request import Request
from lazyio.engine.sampling import choose_each
from lazyio.engine.state import State
from lazyio.engine.waits import Wait
from lazyio.errors import NeverFits, NoRoom

_T = TypeVar("_T")

# Queued prompts are read ahead until their rows would take so much of what the table has room for: one part in so many.
# The rest is for the prompts that are being computed, which come behind them in the queue of reads.
_ROOM_OF_QUEUE = 2


@dataclass(slots=True)
class Counts:
    """What a scheduler did.

    `rows_s` is what asking for the rows of the next tokens took, up to where their reads are under way; `host_s` what
    steps took beside that and beside launching and waiting for the model.
    """

    steps: int = 0
    steps_s: float = 0.0
    rows_s: float = 0.0
    host_s: float = 0.0
    most_lanes: int = 0
    refused: int = 0  # times that the first of the queue found no room

    def add(self, seconds: float, host_s: float) -> None:
        """Count a step."""
        self.steps += 1
        self.steps_s += seconds
        self.host_s += host_s


class Scheduler:
    """Serves requests, up to `parallel` at once. Whoever wants their replies calls `step`, until they are there.

    A request that fails has its `error` and gives up its lane; the others go on. By one thread at a time.
    """

    def __init__(
        self, forward: Forward, feed: Feed | None, admission: Admission, limits: Limits, parallel: int
    ) -> None:
        self._forward, self._feed, self._admission, self._parallel = forward, feed, admission, parallel
        self._planner = Planner(feed, limits)
        self._room_ahead = 0 if feed is None else feed.tokens_ahead // _ROOM_OF_QUEUE
        self._queue: deque[Request] = deque()
        self._unread: deque[Request] = deque()  # of the queue, those whose rows have not been asked for, and some gone
        self._ahead_tokens = 0  # of the queue, those whose rows have
        self._leaving: list[Request] = []  # cancelled while a step was under way
        self._lanes: list[Request] = []
        self._asked = Asked()
        self._busy = False
        self.counts = Counts()

    def add(self, request: Request) -> None:
        """Queue a request. The rows that its prompt begins with are asked for as soon as there is room for them.

        Raises what asking for them raises, NeverFits where its state has no room even by itself.
        """
        self._admission.fits_ever(len(request.prompt) + request.plan.max_tokens)
        request.meter.begin()
        self._at_work(lambda: self._queue_up(request))
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request) -> None:
        """End a request where it is. It never waits, and harms nothing when the request has ended."""
        if self._busy:
            self._leaving.append(request)
        else:
            self._at_work(lambda: self._end(request))

    def step(self) -> bool:
        """Compute the next ubatch; False if there is nothing to do. What goes wrong with a request is its `error`.

        An interrupt ends all requests: nobody knows how far the model has got.
        """
        return self._at_work(self._step)

    def apart(self, tokens: int, compute: Callable[[State], _T]) -> _T:
        """What is computed with the state of a sequence of so many tokens that takes no lane; nothing of it is kept.

        Raises NoRoom and NeverFits where it has no room, and what `compute` raises: requests go on. An interrupt ends
        them all, as one of `step` does.
        """
        return self._at_work(lambda: self._apart(tokens, compute), alone=True)

    def close(self) -> None:
        """End all requests where they are."""
        self._end_all([*self._lanes, *self._queue], None)

    def _at_work(self, act: Callable[[], _T], *, alone: bool = False) -> _T:
        """What `act` returns. Requests end with it where it goes wrong; with `alone`, only where it is interrupted.

        No context manager, since an interrupt may come between that and its with block.
        """
        assert not self._busy, "a scheduler is for one thread at a time"
        try:
            self._busy = True
            return act()
        except BaseException as error:
            # Replies that an interrupt ends have no error: they are just not whole.
            if not isinstance(error, Exception):
                self._abandon(None)
            elif not alone:
                self._abandon(error)
            raise
        finally:
            self._busy = False

    def _step(self) -> bool:
        began = time.perf_counter()
        self._sweep()
        self._seat()
        batch = self._next()
        self._read_ahead()
        if batch is not None and batch.planned.error is not None:
            self._end_all([chunk.request for chunk in batch.planned.chunks], batch.planned.error)
            batch = Batch(batch.stepping, Planned())
        if batch is not None and len(batch):
            self._compute(batch, began)
        return batch is not None

    def _apart(self, tokens: int, compute: Callable[[State], _T]) -> _T:
        seat = self._admission.apart(tokens)
        try:
            return compute(seat.state)
        finally:
            self._admission.release(seat)

    # --- who is served -----------------------------------------------------------------------------------------------

    def _queue_up(self, request: Request) -> None:
        self._queue.append(request)
        self._unread.append(request)
        self._read_ahead()

    def _sweep(self) -> None:
        while self._leaving:
            self._end(self._leaving.pop())

    def _seat(self) -> None:
        while self._queue and len(self._lanes) < self._parallel:
            request = self._queue[0]
            try:
                request.begin(self._admission.seat(request.prompt, request.plan.max_tokens))
            except Exception as error:
                if isinstance(error, NoRoom) and self._lanes:
                    self.counts.refused += 1
                    return
                self._end(request, error)
                continue
            self._lanes.append(request)  # in both for a moment, so that an interrupt finds it
            self._queue.popleft()
            self._take_out(request)
        self.counts.most_lanes = max(self.counts.most_lanes, len(self._lanes))

    def _read_ahead(self) -> None:
        """Ask for the rows that queued prompts begin with, the next ones first."""
        if self._feed is None or not self._feed.lookahead:
            self._unread.clear()
            return
        while self._unread:
            request = self._unread[0]
            if request.seat is None and not request.ended:
                alone = not self._lanes and request is self._queue[0]
                tokens = self._planner.first_of(request, alone=alone)
                if self._ahead_tokens + tokens > self._room_ahead and not alone:
                    return
                self._ask_early(self._feed, request, tokens)
            self._unread.popleft()

    def _ask_early(self, feed: Feed, request: Request, tokens: int) -> None:
        try:
            request.first = feed.ahead([(request.prompt[:tokens], None)], patient=True)
            request.ahead_tokens = tokens
            self._ahead_tokens += tokens
        except Exception as error:
            self._end(request, error)

    def _take_out(self, request: Request) -> None:
        """Of the queue: its rows need no more room there."""
        self._ahead_tokens -= request.ahead_tokens
        request.ahead_tokens = 0

    def _abandon(self, error: Exception | None) -> None:
        """End all requests where nobody knows how far anything got, not even the taking and giving back of memory."""
        for request in [*self._lanes, *self._queue]:
            request.end(request.error or error)
            request.seat = None
        for requests in (self._lanes, self._queue, self._unread, self._leaving):
            requests.clear()
        self._ahead_tokens = 0
        self._planner.clear()
        self._asked = Asked()
        self._admission.clear()

    def _end_all(self, requests: Sequence[Request], error: Exception | None) -> None:
        for request in requests:
            self._end(request, error)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Take a request out, with all that it holds. Harmless when done twice.

        Its state is no use to others after an error.
        """
        if request.ended:
            return
        request.end(error)
        self._planner.forget(request)
        self._take_out(request)
        if request in self._lanes:
            self._lanes.remove(request)
        elif request in self._queue:
            self._queue.remove(request)
        if request.seat is not None:
            self._admission.release(request.seat, request.known if error is None else None)
            request.seat = None

    # --- ubatches ----------------------------------------------------------------------------------------------------

    def _next(self) -> Batch | None:
        stepping = tuple(request for request in self._lanes if request.replies)
        planned = self._planner.next(self._lanes)
        return Batch(stepping, planned) if stepping or planned.chunks else None

    def _compute(self, batch: Batch, began: float) -> None:
        requests, places = batch.choosing()
        rows = self._rows(batch)
        launched = time.perf_counter()
        try:
            hidden = self._forward.step([*batch.chunks], rows)
            chosen = self._choose(requests, select(hidden, places)) if requests else None
            awaited = time.perf_counter()
            tokens = [] if chosen is None else chosen.tolist()  # the one time that the host waits for the device
        except Exception as error:  # all of their states are somewhere in the middle
            self._end_all(batch.requests, _told(error, batch))
            return
        done = time.perf_counter()
        for place, failure in ({} if rows is None else rows.failed).items():
            self._end(batch.owner(place), failure)
        self._mark(batch)
        asking_s = self._go_on(requests, tokens)
        self.counts.rows_s += asking_s
        seconds = time.perf_counter() - began
        _note(batch, Wait() if rows is None else rows.wait, seconds, done - awaited)
        self.counts.add(seconds, seconds - (done - launched) - asking_s)

    def _mark(self, batch: Batch) -> None:
        for chunk in batch.planned.chunks:
            request = chunk.request
            if request.seat is not None and chunk.stop in request.seat.marks:
                self._admission.mark(request.seat, request.known[: chunk.stop])

    def _rows(self, batch: Batch) -> BatchRows | None:
        if self._feed is None:
            return None
        parts = batch.parts(self._asked)
        for part in parts:
            part.rows.send()
        return BatchRows(self._feed, parts, len(batch), self._planner.send)

    def _choose(self, requests: Sequence[Request], hidden: torch.Tensor) -> torch.Tensor:
        logits = self._forward.logits(hidden)
        return choose_each([request.sampler for request in requests], logits)

    def _go_on(self, requests: Sequence[Request], tokens: Sequence[int]) -> float:
        """Give each its token, ask for the rows of those that go on, and only then make text of it.

        Returns the seconds that the asking took.
        """
        going = []
        for request, token in zip(requests, tokens, strict=True):
            if not request.ended and self._tried(request, lambda: request.take(token)):  # noqa: B023
                going.append(request)
        began = time.perf_counter()
        self._ask(going)
        asking_s = time.perf_counter() - began
        for request in requests:
            if not request.ended and not self._tried(request, request.write):
                self._end(request)
        return asking_s

    def _tried(self, request: Request, act: Callable[[], bool]) -> bool:
        try:
            return act()
        except Exception as error:
            self._end(request, error)
            return False

    def _ask(self, requests: Sequence[Request]) -> None:
        self._asked = Asked()
        if self._feed is None or not requests:
            return
        context = self._feed.row_ids.context
        tokens = [(request.known[-1:], request.before(len(request.known) - 1, context)) for request in requests]
        try:
            self._asked = Asked(tuple(requests), self._feed.step(tokens))
        except Exception as error:
            self._end_all(requests, error)


def _told(error: Exception, batch: Batch) -> Exception:
    """What a forward pass failed with, in our own words where it lacked memory."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    told = NeverFits(
        f"memory ran out while {len(batch)} tokens of {len(batch.requests)} sequences were computed: lower ubatch, "
        "mixed or parallel, or set kv_pages to fewer pages"
    )
    told.__cause__ = error
    return told


def _note(batch: Batch, wait: Wait, seconds: float, awaited_s: float) -> None:
    for request in batch.stepping:
        request.meter.step_done(seconds)
    for chunk in batch.planned.chunks:
        chunk.request.meter.prompt_done(len(chunk), seconds)
    for request in batch.requests:
        request.meter.shared(wait, awaited_s, len(batch.requests))
