"""The ubatches of the prompts that have a lane, planned ahead so that their rows can be on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lazyio.engine.batch_rows import Move, Part
from lazyio.engine.feed import Feed
from lazyio.engine.forward import BLOCK
from lazyio.engine.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """How many tokens of prompts a ubatch has: at most `ubatch`, and `mixed` where replies go on in it."""

    ubatch: int
    mixed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a prompt."""

    request: Request
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the reply begins after it."""
        return self.stop == len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class Planned:
    """What a ubatch has of prompts, and their rows. `error` is why these could not be asked for."""

    chunks: tuple[Chunk, ...] = ()
    parts: tuple[Part, ...] = ()
    error: Exception | None = None

    def cancel(self) -> None:
        """Give the rows up. Never waits."""
        for part in self.parts:
            part.rows.cancel()


class Planner:
    """Plans as many ubatches beyond the next one as are read ahead. Chunks of a prompt keep their order.

    Prompts come by their arrival. Where replies go on, or will when the ubatch comes, the limit is the lower one: a
    long prompt does not keep them waiting for longer than that many tokens take.
    """

    def __init__(self, feed: Feed | None, limits: Limits) -> None:
        self._feed, self._limits = feed, limits
        self._ahead = 0 if feed is None else feed.lookahead
        self._planned: deque[Planned] = deque()

    def first_of(self, request: Request, *, alone: bool) -> int:
        """Tokens of a prompt whose rows are asked for while it waits for a lane; `alone` if nothing else goes on."""
        return min(request.plan.cuts[0], self._limits.ubatch if alone else self._limits.mixed)

    def next(self, lanes: Sequence[Request]) -> Planned:
        """What the next ubatch has of the prompts in `lanes`, which are in the order of their arrival."""
        replies = any(request.replies for request in lanes)
        replies = replies or any(chunk.is_last for planned in self._planned for chunk in planned.chunks)
        while len(self._planned) <= self._ahead:
            chunks = self._chunks(lanes, self._limits.mixed if replies else self._limits.ubatch)
            if not chunks:
                break
            self._planned.append(self._with_rows(chunks))
            replies = replies or any(chunk.is_last for chunk in chunks)
        return self._planned.popleft() if self._planned else Planned()

    def send(self) -> None:
        """Have the rows of the ubatch that comes next copied to the device, if they are there."""
        for part in self._planned[0].parts if self._planned else ():
            part.rows.send()

    def forget(self, request: Request) -> None:
        """Take what was planned of a prompt out, and what comes behind it too, which is planned anew."""
        while any(chunk.request is request for planned in self._planned for chunk in planned.chunks):
            dropped = self._planned.pop()
            dropped.cancel()
            for chunk in dropped.chunks:
                chunk.request.planned -= len(chunk)

    def clear(self) -> None:
        """Drop all that was planned, of prompts that have all ended."""
        while self._planned:
            self._planned.popleft().cancel()

    def _chunks(self, lanes: Sequence[Request], room: int) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        for request in lanes:
            if room and request.planned < len(request.prompt):
                stop = self._stop(request, room, first=not chunks)
                if stop > request.planned:
                    chunks.append(Chunk(request, request.planned, stop))
                    room -= stop - request.planned
                    request.planned = stop
        return tuple(chunks)

    @staticmethod
    def _stop(request: Request, room: int, *, first: bool) -> int:
        """Where the next chunk of a prompt ends: at a cut of its own, else at a multiple of BLOCK if there is one."""
        stop = min(request.next_cut(), request.planned + room)
        if stop == request.next_cut():
            return stop
        even = stop // BLOCK * BLOCK
        return even if even > request.planned or not first else stop

    def _with_rows(self, chunks: tuple[Chunk, ...]) -> Planned:
        try:
            return Planned(chunks, () if self._feed is None else tuple(_parts(self._feed, chunks)))
        except Exception as error:  # it ends those requests, at their turn
            return Planned(chunks, error=error)


def _parts(feed: Feed, chunks: Sequence[Chunk]) -> list[Part]:
    """The rows of all chunks, asked for together but for those that have been asked for already."""
    parts: list[Part] = []
    asked, moves, target = [], list[Move](), 0
    for chunk in chunks:
        request, start = chunk.request, chunk.start
        if request.first is not None:
            there = min(len(request.first) - request.skipped, len(chunk))
            parts.append(Part(request.first, (Move(request.skipped, target, there),)))
            request.first.hurry()
            request.first, start = None, start + there
        if start < chunk.stop:
            source = moves[-1].source + moves[-1].length if moves else 0
            moves.append(Move(source, target + start - chunk.start, chunk.stop - start))
            asked.append((request.prompt[start : chunk.stop], request.before(start, feed.row_ids.context)))
        target += len(chunk)
    if asked:
        parts.append(Part(feed.ahead(asked), tuple(moves)))
    return parts
