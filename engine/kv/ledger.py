"""What every lane has claimed of the pool, what waits, and what can never be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lazyio.engine.kv.pool import PAGE, Pages, Pool
from lazyio.engine.kv.prefixes import Match, Prefixes
from lazyio.engine.kv.tables import Table
from lazyio.errors import NeverFits, NoRoom
from lazyio.units import format_bytes

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """What a device has for the engine, and what is taken of it beside the pool, all in bytes."""

    had_bytes: int
    weights_bytes: int
    reserve_bytes: int
    page_bytes: int


@dataclass(eq=False, slots=True)
class Seat:
    """What a lane holds: pages for `tokens` positions, and a run of pages for its state.

    The first `prefix.tokens` of its tokens are known: the pages that they fill are in the table, the state and the page
    that is partly filled are to be copied, and stay `pinned` until `Ledger.resumed`.
    """

    tokens: int
    table: Table
    runs: Pages
    prefix: Match
    pinned: list[int]


def pages_of(tokens: int, forward_tokens: int = 1) -> int:
    """Pages for a prompt and reply of so many tokens together, and a forward that is under way when they end."""
    return -(-(tokens + forward_tokens) // PAGE)


def check_fits(tokens: int, pages: int, run_pages: int, pool_pages: int) -> None:
    """Raise NeverFits if so many tokens, which take `pages` and a run, are more than a whole pool."""
    if pages + run_pages > pool_pages:
        state = f" and {run_pages} for its state" if run_pages else ""
        raise NeverFits(
            f"a prompt and a reply of {tokens} tokens together take {pages} pages of {PAGE} positions{state}, and the "
            f"pool has {pool_pages}: set kv_pages to {pages + run_pages} or more, shorten the prompt or lower "
            "max_tokens"
        )


class Ledger:
    """Claims of lanes on a pool, whole when they are seated: nothing that is seated can run out of room.

    A claim is the prompt, the reply and `forward_tokens` more, as a forward is under way when the end is seen, in
    pages, and `run_pages` for the state. `streams` is how many lanes there may be, which is only told.
    """

    def __init__(self, pool: Pool, run_pages: int, *, streams: int, memory: Memory, forward_tokens: int = 1) -> None:
        self.pool, self.run_pages = pool, run_pages
        self.prefixes = Prefixes(pool, stateful=run_pages > 0)
        self._streams, self._memory, self._forward_tokens = streams, memory, forward_tokens
        self._seats: set[Seat] = set()

    @property
    def seated(self) -> int:
        """Lanes that hold something."""
        return len(self._seats)

    @property
    def free(self) -> int:
        """Pages that can be had now: those nobody holds, and those of kept prefixes that no lane is using."""
        return self.pool.free + self.prefixes.inactive

    def pages_of(self, tokens: int) -> int:
        """Pages for a prompt and reply of so many tokens together."""
        return pages_of(tokens, self._forward_tokens)

    def fits_ever(self, tokens: int) -> None:
        """Raise NeverFits if a prompt and reply of so many tokens together are more than the whole pool."""
        check_fits(tokens, self.pages_of(tokens), self.run_pages, len(self.pool))

    def seat(self, prompt_tokens: int, max_tokens: int, prefix: Match | None = None) -> Seat:
        """Claim what a request needs. Kept prefixes are evicted for it, but for the one that it resumes, `prefix`.

        That is left out if the request would otherwise wait for nobody but itself. Raises NoRoom where lanes must end
        first, NeverFits as `fits_ever` does; then nothing is held.
        """
        self.fits_ever(prompt_tokens + max_tokens)
        prefix = prefix or Match()
        try:
            return self._seat(prompt_tokens + max_tokens, prefix)
        except NoRoom:
            if self._seats or not prefix.tokens:
                raise
        return self._seat(prompt_tokens + max_tokens, Match(prefix.matched))

    def resumed(self, seat: Seat) -> None:
        """What the lane resumes has been copied: let go of the copies' sources."""
        self.pool.give_back(seat.pinned)
        seat.pinned = []

    def mark(self, seat: Seat, tokens: Sequence[int]) -> Pages | None:
        """Keep the beginning of a running lane, whole pages of tokens: the run that its state is to be copied to.

        None where there is no need or no room to copy: a snapshot lets nobody wait.
        """
        assert tokens, "nothing to keep"
        assert len(tokens) % PAGE == 0, f"{len(tokens)} tokens end within a page"
        pages = seat.table.covering(len(tokens))
        if not self.run_pages:
            self.prefixes.keep(tokens, pages, None)
            return None
        if self.prefixes.match(tokens, len(tokens)).tokens == len(tokens):
            return None
        self.prefixes.evict(lambda: self.pool.has_run(self.run_pages))
        if not self.pool.has_run(self.run_pages):
            return None
        run = self.pool.take_run(self.run_pages)
        self.prefixes.keep(tokens, pages, run)
        return run

    def release(self, seat: Seat, keep: Sequence[int] | None = None) -> None:
        """A lane has ended. `keep` are the tokens that were computed, to be kept for those who begin alike.

        Its state must be the one after them. Without `keep` nothing is kept of it but what was marked.
        """
        assert seat in self._seats, "a seat was released twice"
        self._seats.remove(seat)
        self.resumed(seat)
        if keep:
            self.prefixes.keep(keep, seat.table.covering(len(keep)), seat.runs if self.run_pages else None)
        elif self.run_pages:
            self.pool.give_back(seat.runs)
        self.pool.give_back(seat.table.pages)

    def clear(self) -> None:
        """Begin afresh, though a call was interrupted in the middle: nobody holds anything, and nothing is kept."""
        self._seats.clear()
        self.pool.clear()
        self.prefixes = Prefixes(self.pool, stateful=self.run_pages > 0)

    def summary(self) -> str:
        """One line: how the memory of the device is divided. The parts, in whole MiB, sum to what there is."""
        of = self._memory
        streams = min(self._streams, len(self.pool) // self.run_pages) if self.run_pages else self._streams
        of_streams = streams * self.run_pages
        parts = {
            "weights": of.weights_bytes,
            "reserve": of.reserve_bytes,
            "streams": of_streams * of.page_bytes,
            "pages": (len(self.pool) + 1 - of_streams) * of.page_bytes,
        }
        whole = {name: size // _MIB for name, size in parts.items()}
        had = of.had_bytes // _MIB
        told = [f"{size} {name}" for name, size in whole.items()]
        return (
            f"memory of {had} MiB = {' + '.join(told)} + {had - sum(whole.values())} left; {streams} streams of "
            f"{self.run_pages} pages, {len(self.pool) - of_streams} pages of {PAGE} positions and the null page, "
            f"{format_bytes(of.page_bytes)} each"
        )

    def _seat(self, tokens: int, prefix: Match) -> Seat:
        pinned = [] if prefix.partial is None else [prefix.partial]
        if prefix.run is not None:
            pinned += prefix.run.tolist()
        shared = np.array(prefix.pages, np.int32)
        self.pool.share(shared)
        self.pool.share(pinned)
        try:
            runs, fresh = self._claim(self.pages_of(tokens) - len(shared))
        except NoRoom:
            self.pool.give_back(pinned)
            self.pool.give_back(shared)
            raise
        seat = Seat(tokens, Table(np.concatenate([shared, fresh])), runs, prefix, pinned)
        self._seats.add(seat)
        return seat

    def _claim(self, pages: int) -> tuple[Pages, Pages]:
        """A run and so many pages; raises NoRoom if that takes more than evicting what is inactive."""
        needed = pages + self.run_pages

        def enough() -> bool:
            return self.pool.free >= needed and self.pool.has_run(self.run_pages)

        if not enough() and self.free >= needed:
            self.prefixes.evict(enough)
        if not enough():
            raise NoRoom(
                f"{pages} pages and {self.run_pages} in a row for a state are needed; of {len(self.pool)} pages "
                f"{self.free} can be had, the others are held by {self.seated} lanes: one of these must end first"
            )
        runs = self.pool.take_run(self.run_pages) if self.run_pages else np.empty(0, np.int32)
        return runs, self.pool.take(pages)
