"""Page tables: where the positions of a sequence lie in the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lazyio.engine.kv.pool import NULL, PAGE, Pages


class Table:
    """The pages of a sequence, in the order of its positions. It is made when a request is seated and never changes."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.pages.flags.writeable = False

    @property
    def capacity(self) -> int:
        """Positions that have a page."""
        return len(self.pages) * PAGE

    def slots(self, first: int, count: int, ratio: int = 1) -> npt.NDArray[np.int64]:
        """Where the entries [first, first + count) lie, as page * entries a page + entry in the page: int64 [count].

        An entry stands for `ratio` positions. Positions without a page have a place in the null page.
        """
        each = PAGE // ratio
        entries = np.arange(first, first + count)
        pages = entries // each
        mapped = pages < len(self.pages)
        found = np.where(mapped, self.pages[np.where(mapped, pages, 0)] if len(self.pages) else NULL, NULL)
        return found.astype(np.int64) * each + entries % each

    def in_a_row(self, first: int, most: int) -> int:
        """How many of the `most` pages from the one numbered `first` on lie in the pool in a row, 1 at least."""
        some = self.pages[first : first + max(1, most)]
        breaks = np.flatnonzero(np.diff(some) != 1)
        return int(breaks[0]) + 1 if len(breaks) else len(some)

    def covering(self, tokens: int) -> Pages:
        """The pages that hold the first so many positions."""
        return self.pages[: -(-tokens // PAGE)]


def stacked(tables: Sequence[Table], width: int | None = None) -> Pages:
    """Tables below each other, int32 [tables, width], with the null page behind each; by default as wide as needed."""
    wide = max((len(table.pages) for table in tables), default=0) if width is None else width
    found = np.full((len(tables), wide), NULL, np.int32)
    for row, table in zip(found, tables, strict=True):
        row[: len(table.pages)] = table.pages
    return found
