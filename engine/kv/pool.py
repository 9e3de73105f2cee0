"""Which pages of the pool are whose: pages from the bottom, runs from the top, and how many hold each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lazyio.errors import NoRoom

#: Token positions of a page.
PAGE = 256
#: The page that no one owns: what is not mapped names it.
NULL = 0

Pages = npt.NDArray[np.int32]


class Pool:
    """Ids of `count` pages, the null page among them, and how many hold each; nobody holds a free one.

    The lowest free ids go first to pages, the highest that lie in a row to runs, so that whoever makes the same calls
    gets the same ids.
    """

    def __init__(self, count: int) -> None:
        assert count > 1, "a pool has the null page and at least one more"
        self._held = np.zeros(count, np.int32)
        self.peak = 0
        self.clear()

    def clear(self) -> None:
        """Free all pages but the null page, whoever holds them."""
        self._held[:] = 0
        self._held[NULL] = 1
        self._free = len(self)

    def __len__(self) -> int:
        """Pages that can be held: all but the null page."""
        return len(self._held) - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    @property
    def used(self) -> int:
        """Pages that someone holds."""
        return len(self) - self._free

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return int(self._held[page])

    def held_once(self, pages: npt.NDArray[np.bool_]) -> int:
        """How many of the pages that are marked in `pages`, bool [pages with the null page], one alone holds."""
        return int(np.count_nonzero(pages & (self._held == 1)))

    def take(self, count: int) -> Pages:
        """The `count` lowest free pages, int32 ascending, held once. Raises NoRoom, and then nothing has changed."""
        if count > self._free:
            raise NoRoom(f"{count} pages were asked for, and {self._free} of {len(self)} are free")
        pages = np.flatnonzero(self._held == 0)[:count].astype(np.int32)
        self._hold(pages)
        return pages

    def take_run(self, count: int) -> Pages:
        """The `count` highest free pages in a row, int32 ascending, held once. Raises NoRoom as `take` does."""
        first = self._highest_gap(count)
        if first is None:
            raise NoRoom(f"{count} pages in a row were asked for, and of {self._free} free ones no so many are")
        run = np.arange(first, first + count, dtype=np.int32)
        self._hold(run)
        return run

    def has_run(self, count: int) -> bool:
        """Whether so many free pages lie in a row."""
        return self._highest_gap(count) is not None

    def share(self, pages: Pages | Sequence[int]) -> None:
        """Hold pages once more that someone holds already. No page may come twice."""
        assert self._are_held(pages), "a free page was shared"
        self._held[pages] += 1

    def give_back(self, pages: Pages | Sequence[int]) -> None:
        """Hold pages once less; they are free where that was the last time. No page may come twice."""
        assert self._are_held(pages), "a free page was given back"
        self._held[pages] -= 1
        self._free += int((self._held[pages] == 0).sum())

    def _hold(self, pages: Pages) -> None:
        self._held[pages] = 1
        self._free -= len(pages)
        self.peak = max(self.peak, self.used)

    def _are_held(self, pages: Pages | Sequence[int]) -> bool:
        return NULL not in pages and bool((self._held[pages] > 0).all())

    def _highest_gap(self, count: int) -> int | None:
        """The first of the `count` highest free pages in a row."""
        if count > self._free:
            return None
        if count == 0:
            return len(self._held)
        # A gap ends before each held page and at the end of the pool, and begins behind a held one.
        held = np.append(np.flatnonzero(self._held), len(self._held))
        fits = np.flatnonzero(np.diff(held) > count)
        return int(held[fits[-1] + 1]) - count if len(fits) else None
