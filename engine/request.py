"""A prompt and its reply on their way through the scheduler."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import accumulate

import numpy as np

from lazyio.engine.account import Meter
from lazyio.engine.admission import Seat
from lazyio.engine.feed import TokenRows
from lazyio.engine.sampling import Sampler, no_numbers
from lazyio.engine.writing import Piece, Plan, Writing
from lazyio.fetchers.base import Int64


class Request:
    """What is known of a request. `pieces` are those of its reply that nobody has taken, `error` what ended it.

    `planned` tokens of its prompt have a place in a ubatch. `first` are the rows that its prompt begins with, asked for
    while it waited for a lane, of which `skipped` tokens turned out to be known; those of `ahead_tokens` count to what
    is read ahead for the queue.
    """

    def __init__(self, plan: Plan, sampler: Sampler, writing: Writing, meter: Meter) -> None:
        self.plan, self.sampler, self.writing, self.meter = plan, sampler, writing, meter
        self.prompt: Int64 = np.array(plan.tokens, np.int64)
        self.known = list(plan.tokens)  # of prompt and reply
        self.planned = self.skipped = self.ahead_tokens = 0
        self.first: TokenRows | None = None
        self.seat: Seat | None = None
        self.pieces: deque[Piece] = deque()
        self.error: Exception | None = None
        self.ended = False

    @property
    def replies(self) -> bool:
        """Whether its next token is one of the reply, which waits to be computed."""
        return len(self.known) > len(self.prompt)

    def begin(self, seat: Seat) -> None:
        """It has a lane: go on behind the tokens that are known."""
        self.seat, self.planned, self.skipped = seat, seat.known, seat.known
        if self.first is not None and len(self.first) <= seat.known:
            self.first.cancel()
            self.first = None
        self.meter.seated(seat.known)

    def end(self, error: Exception | None) -> None:
        """Nothing more comes of it. What it holds of memory is the scheduler's to give back."""
        self.ended, self.error = True, error
        self.meter.end()
        if self.first is not None:
            self.first.cancel()
            self.first = None

    def next_cut(self) -> int:
        """Where the ubatch that its next planned token lies in would end, were it alone."""
        marks = () if self.seat is None else self.seat.marks
        ends = heapq.merge(accumulate(self.plan.cuts), marks)
        return next((end for end in ends if end > self.planned), len(self.prompt))

    def before(self, place: int, context: int) -> list[int]:
        """The tokens that row ids of those from `place` on depend on."""
        return self.known[max(0, place - context) : place]

    def take(self, token: int) -> bool:
        """Go on with the token that was chosen; whether the rows of it will be needed, as far as is known.

        Raises ModelError for -1, which stands for logits that are no numbers.
        """
        token = self.sampler.settle(token)
        if token < 0:
            raise no_numbers(f"the logits after {len(self.known)} tokens")
        self.known.append(token)
        return self.writing.add(token)

    def write(self) -> bool:
        """Make a piece of that token; whether the reply goes on."""
        self.pieces.append(self.writing.piece())
        return self.writing.reason is None
