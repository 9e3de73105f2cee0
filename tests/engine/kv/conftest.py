"""Nothing leaks: what a test takes of a pool is given back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lazyio.engine.kv.ledger import Ledger, Memory
from lazyio.engine.kv.pool import Pool

MADE: list[Ledger] = []


def make_ledger(pages: int, run_pages: int = 2, streams: int = 1) -> Ledger:
    """A ledger whose pool has so many pages beside the null page."""
    ledger = Ledger(Pool(pages + 1), run_pages, streams=streams, memory=Memory(1 << 30, 1 << 20, 1 << 20, 1 << 16))
    MADE.append(ledger)
    return ledger


@pytest.fixture
def ledger() -> Iterator[Callable[..., Ledger]]:
    """`ledger(pages, run_pages=2)`; at the end of the test no lane may hold anything, and all else is inactive."""
    MADE.clear()
    yield make_ledger
    for made in MADE:
        assert made.seated == 0
        made.prefixes.clear()
        assert made.prefixes.pages == 0
        assert made.pool.used == 0
