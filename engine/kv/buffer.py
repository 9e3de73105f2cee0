"""The memory of the pool on a device, and what a state has of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lazyio.engine.kv.layout import Layout, Place
from lazyio.engine.kv.pieces import LaneTable, Paged, Placed, Window
from lazyio.engine.kv.pool import NULL, PAGE, Pages
from lazyio.engine.kv.tables import Table
from lazyio.engine.state import Recent, State

# A byte that makes every float of 1, 2 and 4 bytes no number.
_POISON = 0xFF


class Buffer:
    """The pages of a pool, those that can be held and the null page: uint8 [pages, page_bytes].

    With `poison`, whatever is opened is filled with values that are no numbers, so that a read of what nobody wrote
    shows, and so is the null page. Each opening also asserts that nobody wrote to that.
    """

    def __init__(self, layout: Layout, pages: int, device: torch.device, *, poison: bool) -> None:
        self.layout, self.poison = layout, poison
        self._bytes = torch.empty(pages, layout.page_bytes, dtype=torch.uint8, device=device)
        self._bytes[NULL] = self._fill
        self._planes = [self._plane(place) for place in layout.planes]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._bytes.nbytes

    def open(self, table: Table, run: Pages, owned: Pages, tokens: int) -> State:
        """The state of a sequence that has these pages and this run; `tokens` of it are in them already.

        `owned` are pages of the table that nobody has written to for this sequence.
        """
        if self.poison:
            assert self.null_is_clean(), "someone wrote to the null page"
            self._bytes[self._places(owned)] = _POISON
        self._bytes[self._places(run)] = self._fill
        places = _Opening(
            self._planes, self._parts(run), LaneTable(table, self._sent(table.pages)), tokens, zero=self.poison
        )
        pieces = {module: piece.placed(places) for module, piece in self.layout.template.pieces.items()}
        state = State(pieces, table.capacity)
        state.tokens = tokens
        return state

    def copy(self, source: Pages | Sequence[int], target: Pages | Sequence[int]) -> None:
        """Copy pages, or a run, to others."""
        if len(source):
            self._bytes[self._places(target)] = self._bytes[self._places(source)]

    def null_is_clean(self) -> bool:
        """Whether the null page is as it was made. Waits for the device."""
        return bool((self._bytes[NULL] == self._fill).all())

    @property
    def _fill(self) -> int:
        return _POISON if self.poison else 0

    def _places(self, pages: Pages | Sequence[int]) -> slice | torch.Tensor:
        """Those pages of the buffer, in one piece where they lie so."""
        first = int(pages[0]) if len(pages) else 0
        if np.array_equal(pages, range(first, first + len(pages))):
            return slice(first, first + len(pages))
        return self._sent(pages)

    def _sent(self, pages: Pages | Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(pages, np.int64)).to(self._bytes.device)

    def _plane(self, place: Place) -> torch.Tensor:
        """That plane of all pages, [pages, *its shape]."""
        return self._view(place, 0, len(self._bytes))

    def _parts(self, run: Pages) -> list[torch.Tensor]:
        first = int(run[0]) * self.layout.page_bytes if len(run) else 0
        return [self._view(place, first, 1)[0] for place in self.layout.parts]

    def _view(self, place: Place, first: int, pages: int) -> torch.Tensor:
        size = place.dtype.itemsize
        inner = torch.empty(place.shape, device="meta").stride()
        strides = (self.layout.page_bytes // size, *inner)
        flat = self._bytes.view(-1).view(place.dtype)
        return flat.as_strided((pages, *place.shape), strides, (first + place.offset) // size)


class _Opening:
    """Places of one sequence, of which so many tokens are known, taken in the order in which they were measured.

    With `zero`, the run is not what a sequence begins with, and must become it where that is zero.
    """

    def __init__(
        self,
        planes: list[torch.Tensor],
        parts: list[torch.Tensor],
        table: LaneTable,
        tokens: int,
        *,
        zero: bool,
    ) -> None:
        self._planes: Iterator[torch.Tensor] = iter(planes)
        self._parts: Iterator[torch.Tensor] = iter(parts)
        self._table, self._tokens, self._zero = table, tokens, zero

    def growing(self, entries: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        return Paged(next(self._planes), self._table, self._tokens // (PAGE // entries))

    def sliding(self, reach: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        return Window(next(self._parts), min(reach, self._tokens))

    def recent(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        return Recent.at(self._begun())

    def recurrent(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        return Placed(self._begun())

    def _begun(self) -> torch.Tensor:
        part = next(self._parts)
        return part.zero_() if self._zero else part
