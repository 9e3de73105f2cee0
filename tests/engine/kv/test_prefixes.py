from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from lazyio.engine.kv.pool import PAGE, Pages, Pool
from lazyio.engine.kv.prefixes import Match, Prefixes

TEXT = np.random.default_rng(0).integers(0, 1000, 4 * PAGE).tolist()


def changed(at: int) -> list[int]:
    """TEXT with another token there, and others behind it."""
    return [*TEXT[:at], -1, *TEXT[:PAGE]]


class Kept:
    """A tree, and sequences put into it as lanes do that end."""

    def __init__(self, stateful: bool) -> None:
        self.pool = Pool(64)
        self.tree = Prefixes(self.pool, stateful=stateful)
        self.stateful = stateful

    def keep(self, tokens: Sequence[int], state: bool = True) -> tuple[list[int], Pages | None]:
        pages = self.pool.take(-(-len(tokens) // PAGE))
        run = self.pool.take_run(2) if self.stateful and state else None
        self.tree.keep(tokens, pages, run)
        self.pool.give_back(pages)
        return pages.tolist(), run

    def resumed(self, tokens: Sequence[int]) -> int:
        return self.tree.match(tokens, len(tokens) - 1).tokens


@pytest.fixture(params=[True, False], ids=["stateful", "stateless"])
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    made = Kept(request.param)
    yield made
    made.tree.clear()
    assert made.pool.used == 0


@pytest.fixture
def stateful() -> Iterator[Kept]:
    made = Kept(True)
    yield made
    made.tree.clear()
    assert made.pool.used == 0


def test_nothing_is_kept_of_another_sequence(kept: Kept):
    kept.keep(TEXT[:300])
    assert kept.tree.match(changed(0), 500) == Match()


@pytest.mark.parametrize("at", [255, 256, 257])
def test_a_match_around_a_page_edge(kept: Kept, at: int):
    first, run = kept.keep(TEXT[:PAGE])
    pages, _ = kept.keep(TEXT[:600])
    found = kept.tree.match(changed(at), 500)
    assert found.matched == at
    if kept.stateful:  # resumed where there is a snapshot
        assert found.tokens == (0 if at < PAGE else PAGE)
        assert found.pages == (tuple(first) if at >= PAGE else ())
        assert found.partial is None
        assert (found.run is None) if at < PAGE else np.array_equal(found.run, run)  # type: ignore[arg-type]
    else:
        assert found.tokens == at
        assert found.pages == (tuple(first) if at >= PAGE else ())
        assert found.partial == {255: first[0], 256: None, 257: pages[1]}[at]


def test_one_token_is_always_left_to_compute(kept: Kept):
    kept.keep(TEXT[:300])
    assert kept.resumed(TEXT[:300]) == (0 if kept.stateful else 299)
    assert kept.resumed(TEXT[:301]) == 300


def test_a_sequence_resumes_within_its_last_page(stateful: Kept):
    pages, run = stateful.keep(TEXT[:300])
    found = stateful.tree.match(TEXT, 1000)
    assert (found.matched, found.tokens, found.pages, found.partial) == (300, 300, (pages[0],), pages[1])
    assert np.array_equal(found.run, run)  # type: ignore[arg-type]


def test_the_last_snapshot_within_the_match_counts(stateful: Kept):
    for end in (256, 400, 512, 900):
        stateful.keep(TEXT[:end])
    for at, expected in ((255, 0), (256, 256), (399, 256), (400, 400), (600, 512), (899, 512), (900, 900)):
        assert stateful.tree.match(changed(at), 2000).tokens == expected


def test_equal_pages_are_kept_once(kept: Kept):
    kept.keep(TEXT[:600])
    before = kept.tree.pages
    kept.keep(TEXT[:600])
    assert kept.tree.pages == before == kept.tree.inactive
    kept.keep(TEXT[:300])  # its pages are the beginning of those
    assert kept.tree.pages == before + (2 if kept.stateful else 0)


def test_a_longer_page_takes_the_place_of_its_beginning(kept: Kept):
    kept.keep(TEXT[:300])
    kept.keep(TEXT[:400])
    kept.keep(TEXT[:600])
    assert kept.tree.pages == 3 + (6 if kept.stateful else 0)
    assert kept.tree.match(changed(350), 2000).tokens == (300 if kept.stateful else 350)


def test_pages_alone_resume_no_state(stateful: Kept):
    stateful.keep(TEXT[:600], state=False)
    assert stateful.resumed(TEXT) == 0


def test_what_was_used_longest_ago_goes_first(stateful: Kept):
    others = [[number, *TEXT[:PAGE]] for number in range(3)]
    for each in others:
        stateful.keep(each)
    stateful.resumed([*others[0], 1])
    stateful.tree.evict(lambda: stateful.tree.pages <= 8)
    assert [stateful.resumed([*each, 1]) for each in others] == [257, 0, 257]
    stateful.tree.evict(lambda: stateful.tree.pages <= 4)
    assert [stateful.resumed([*each, 1]) for each in others] == [0, 0, 257]


def test_what_is_in_use_stays(stateful: Kept):
    stateful.keep(TEXT[:PAGE])
    stateful.keep(TEXT[:600])
    found = stateful.tree.match(TEXT[:600], 599)
    assert found.run is not None
    stateful.pool.share(found.pages)
    assert stateful.tree.inactive == 2 + 2 + 2  # two pages, two snapshots
    stateful.pool.share(found.run)
    stateful.tree.clear()
    assert stateful.tree.pages == 3
    assert stateful.resumed(TEXT[:600]) == PAGE
    stateful.pool.give_back(found.run)
    stateful.tree.clear()
    assert stateful.tree.pages == 1  # a snapshot goes though its page is in use
    assert stateful.resumed(TEXT[:600]) == 0
    stateful.pool.give_back(found.pages)
