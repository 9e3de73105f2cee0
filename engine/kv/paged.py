"""Lanes in pages: seated, resumed where they begin like others, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazyio.engine.kv.buffer import Buffer
from lazyio.engine.kv.layout import Layout
from lazyio.engine.kv.ledger import Ledger, Memory, Seat
from lazyio.engine.kv.pool import PAGE, Pool
from lazyio.engine.models.base import Model
from lazyio.engine.place import check_memory
from lazyio.engine.state import State
from lazyio.engine.weights.memory import left_on
from lazyio.errors import NeverFits
from lazyio.host import available_memory_bytes

#: What kv_pages auto leaves free for what is computed.
RESERVE_BYTES = 2 << 30
# A pool that is sized by itself is no larger than so many times what all streams can need: the rest is for prefixes.
_TIMES = 2


@dataclass(eq=False, slots=True)
class PagedSeat:
    """What a lane holds. `state` stands after the first `state.tokens` of its prompt, which are known already.

    At the positions `marks` of the prompt, ascending, a cut is wanted: `Paged.mark` keeps what is there for others.
    """

    claim: Seat
    state: State
    marks: tuple[int, ...]


class Paged:
    """Gives lanes pages and runs of one pool, and keeps what ended lanes leave, if it `reuses` prefixes."""

    def __init__(self, model: Model, pages: int | None, *, streams: int, reuses: bool, poison: bool) -> None:
        """A pool of so many pages; None: as many as there is memory for, up to what so many streams can make use of.

        Raises NeverFits for more than there is memory for, and for a pool that is too small for one page of tokens.
        """
        layout, weights = Layout(model), model.weights_bytes
        free = _free_bytes(model.device)
        if pages is None:
            needed = -(-(model.max_tokens + 1) // PAGE) + layout.run_pages
            room = (free - RESERVE_BYTES) // layout.page_bytes - 1
            pages = max(0, min(room, _TIMES * streams * needed))
        _check_pages(pages, layout)
        what = f"a pool of {pages} pages for keys, values and states"
        check_memory((pages + 1) * layout.page_bytes, what, model.device, "lower kv_pages")
        memory = Memory(free + weights, weights, RESERVE_BYTES, layout.page_bytes)
        self.ledger = Ledger(Pool(pages + 1), layout.run_pages, streams=streams, memory=memory)
        self.buffer = Buffer(layout, pages + 1, model.device, poison=poison)
        self.reuses = reuses

    def fits_ever(self, tokens: int) -> None:
        """See `Ledger`."""
        self.ledger.fits_ever(tokens)

    def seat(self, prompt_tokens: int, max_tokens: int, prompt: Sequence[int] | None = None) -> PagedSeat:
        """A lane for a prompt and the longest reply, resumed at the beginning of `prompt` that is known.

        Without `prompt` nothing is resumed. Raises NoRoom and NeverFits as `Ledger.seat` does.
        """
        known = None
        if prompt is not None and self.reuses:
            known = self.ledger.prefixes.match(prompt, prompt_tokens - 1)
        claim = self.ledger.seat(prompt_tokens, max_tokens, known)
        found = claim.prefix
        owned = claim.table.pages[len(found.pages) :]
        state = self.buffer.open(claim.table, claim.runs, owned, found.tokens)
        if found.partial is not None:
            self.buffer.copy([found.partial], owned[:1])
        if found.run is not None:
            self.buffer.copy(found.run, claim.runs)
        self.ledger.resumed(claim)
        # The last page edge before the prompt's end, and that at which other prompts parted from it.
        edges = {(prompt_tokens - 1) // PAGE * PAGE, found.matched // PAGE * PAGE} if known is not None else set()
        return PagedSeat(claim, state, tuple(sorted(edge for edge in edges if edge > found.tokens)))

    def mark(self, seat: PagedSeat, tokens: Sequence[int]) -> None:
        """Keep the state of a lane, all of whose `tokens` so far fill whole pages, for others that begin alike."""
        assert len(tokens) == seat.state.tokens, "a mark is where the state stands"
        run = self.ledger.mark(seat.claim, tokens)
        if run is not None:
            self.buffer.copy(seat.claim.runs, run)

    def release(self, seat: PagedSeat, keep: Sequence[int] | None = None) -> None:
        """A lane has ended. `keep` are the tokens that its state stands for, unless nothing of it is to be kept."""
        assert keep is None or len(keep) == seat.state.tokens, "what is kept is what the state stands for"
        self.ledger.release(seat.claim, keep if self.reuses else None)

    def summary(self) -> str:
        """See `Ledger`."""
        return self.ledger.summary()


def _free_bytes(device: torch.device) -> int:
    return available_memory_bytes() if device.type == "cpu" else left_on(device)


def _check_pages(pages: int, layout: Layout) -> None:
    least = layout.run_pages + 1
    if pages < least:
        raise NeverFits(
            f"kv_pages comes to {pages}, and one stream takes {least} at least: {layout.run_pages} for its state and 1 "
            f"for {PAGE} positions: set kv_pages to more, or to off"
        )
