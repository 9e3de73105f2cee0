"""Lanes in pages: seated, resumed where they begin like others, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazyio.engine.admission import Seat
from lazyio.engine.kv.buffer import Buffer
from lazyio.engine.kv.layout import Layout
from lazyio.engine.kv.ledger import Ledger, Memory
from lazyio.engine.kv.ledger import Seat as Claim
from lazyio.engine.kv.pool import PAGE, Pool
from lazyio.engine.models.base import Model
from lazyio.engine.place import check_memory, free_bytes
from lazyio.engine.state import State
from lazyio.errors import NeverFits, NoRoom
from lazyio.fetchers.base import Int64

#: What kv_pages auto leaves free for what is computed.
RESERVE_BYTES = 2 << 30
# A pool that is sized by itself is no larger than so many times what all streams can need: the rest is for prefixes.
_TIMES = 2


@dataclass(eq=False, slots=True)
class PagedSeat:
    """What a lane holds; see `lazyio.engine.admission.Seat`."""

    claim: Claim
    state: State
    known: int
    marks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reuse:
    """What is kept of sequences for those that begin alike; at page edges alone, or also where a sequence ended."""

    ends: bool = True


class Paged:
    """Gives lanes pages and runs of one pool: an `Admission`. What ended lanes leave is kept where there is `reuse`."""

    def __init__(
        self,
        model: Model,
        pages: int | None,
        *,
        streams: int,
        reuse: Reuse | None = None,
        poison: bool = False,
    ) -> None:
        """A pool of so many pages; None: as many as there is memory for, up to what so many streams can make use of.

        Raises NeverFits for more pages than there is memory for, and for fewer than one stream takes at least;
        Unsupported as `Layout` does.
        """
        layout, free = Layout(model), free_bytes(model.device)
        if pages is None:
            needed = -(-(model.max_tokens + 1) // PAGE) + layout.run_pages
            room = (free - RESERVE_BYTES) // layout.page_bytes - 1
            pages = max(0, min(room, _TIMES * streams * needed))
        check_pages(pages, layout, model.device)
        memory = Memory(free + model.weights_bytes, model.weights_bytes, RESERVE_BYTES, layout.page_bytes)
        self.ledger = Ledger(Pool(pages + 1), layout.run_pages, streams=streams, memory=memory)
        self.buffer = Buffer(layout, pages + 1, model.device, poison=poison)
        self._reuse = reuse
        self._refused: tuple[Int64, int] | None = None  # who waits until one of the next two changes something

    def fits_ever(self, tokens: int) -> None:
        """See `Ledger`."""
        self.ledger.fits_ever(tokens)

    def seat(self, prompt: Int64, max_tokens: int) -> PagedSeat:
        """A lane for a prompt and the longest reply, with the beginning of the prompt that is known.

        Raises NoRoom and NeverFits as `Ledger.seat` does.
        """
        if self._refused is not None and self._refused[0] is prompt and self._refused[1] == max_tokens:
            raise NoRoom(f"a prompt of {len(prompt)} tokens found no room, and nothing has been given back since")
        last = len(prompt) - 1  # is computed whatever is known
        match = None if self._reuse is None else self.ledger.prefixes.match(prompt, last)
        try:
            claim = self.ledger.seat(len(prompt), max_tokens, match)
        except NoRoom:
            self._refused = prompt, max_tokens
            raise
        state = self._opened(claim)
        known, matched = claim.prefix.tokens, claim.prefix.matched
        # The last page edge of the prompt, and that before which others parted from it, are likely to be met again.
        edges = set() if match is None else {last // PAGE * PAGE, matched // PAGE * PAGE}
        marks = tuple(sorted(edge for edge in edges if known < edge <= last))
        return PagedSeat(claim, state, known, marks)

    def apart(self, tokens: int) -> PagedSeat:
        """See `Admission`. Raises NoRoom and NeverFits as `Ledger.seat` does."""
        claim = self.ledger.seat(tokens, 0)
        return PagedSeat(claim, self._opened(claim), 0, ())

    def mark(self, seat: Seat, tokens: Sequence[int]) -> None:
        """See `Admission`: keep what is there for others."""
        assert isinstance(seat, PagedSeat)
        assert len(tokens) == seat.state.tokens, "a mark is where the state stands"
        self._refused = None
        run = self.ledger.mark(seat.claim, tokens)
        if run is not None:
            self.buffer.copy(seat.claim.runs, run)

    def release(self, seat: Seat, tokens: Sequence[int] | None = None) -> None:
        """See `Admission`."""
        assert isinstance(seat, PagedSeat)
        self._refused = None
        is_kept = tokens is not None and self._reuse is not None and self._reuse.ends
        self.ledger.release(seat.claim, tokens[: seat.state.tokens] if is_kept and tokens else None)

    def clear(self) -> None:
        """See `Admission`. Nothing is kept either."""
        self._refused = None
        self.ledger.clear()

    def summary(self) -> str:
        """See `Ledger`."""
        return self.ledger.summary()

    def _opened(self, claim: Claim) -> State:
        """The state of a lane, with what it resumes copied to where it is its own."""
        try:
            found = claim.prefix
            owned = claim.table.pages[len(found.pages) :]
            state = self.buffer.open(claim.table, claim.runs, owned, found.tokens)
            if found.partial is not None:
                self.buffer.copy([found.partial], owned[:1])
            if found.run is not None:
                self.buffer.copy(found.run, claim.runs)
        except Exception:  # nobody has the seat yet, to release it
            self.ledger.release(claim)
            raise
        self.ledger.resumed(claim)
        return state


def check_pages(pages: int, layout: Layout, device: torch.device, weights_bytes: int = 0) -> None:
    """Raise NeverFits for a pool of fewer pages than a lane takes at least, or more than memory has room for.

    `weights_bytes` are those of weights that are still to be loaded.
    """
    least = layout.run_pages + 1
    if pages < least:
        raise NeverFits(
            f"kv_pages comes to {pages}, and one stream takes {least} at least: {layout.run_pages} for its state and 1 "
            f"for {PAGE} positions: set kv_pages to more, or to off"
        )
    what = f"a pool of {pages} pages for keys, values and states"
    check_memory((pages + 1) * layout.page_bytes, what, device, "lower kv_pages", weights_bytes=weights_bytes)
