import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio import NeverFits
from lazyio.fetchers.base import Bytes, Int64
from lazyio.fetchers.conformance import run_in_child
from lazyio.fetchers.mapping import libc
from lazyio.ple.cache import RowCache

ROW_BYTES = 24
PLACE_BYTES = ROW_BYTES + 5  # with 4-byte tags


def rows_of(ids: Int64) -> Bytes:
    """Rows that tell their ids: three words, none of which another row has."""
    words = ids[:, None] * 3 + np.arange(3)
    return words.astype(np.int64).view(np.uint8).reshape(len(ids), ROW_BYTES)


def array(*ids: int) -> Int64:
    return np.array(ids, np.int64)


def take(cache: RowCache, ids: Int64) -> Int64:
    """Look up, check the rows that were found, and return the ids of the others."""
    out = np.full((len(ids), ROW_BYTES), 0xA5, np.uint8)
    missing = cache.take(ids, out)
    assert (np.diff(missing) > 0).all()
    found = np.delete(np.arange(len(ids)), missing)
    np.testing.assert_array_equal(out[found], rows_of(ids[found]))
    return ids[missing]


def keep(cache: RowCache, ids: Int64) -> None:
    cache.insert(ids, rows_of(ids))


@pytest.fixture
def cache() -> RowCache:
    return RowCache(1_000_000, ROW_BYTES, 1 << 20)


def test_what_was_kept_is_found_in_any_order_and_with_duplicates(cache: RowCache) -> None:
    keep(cache, np.arange(0, 900, 3))
    assert take(cache, array(6, 0, 6, 897, 6)).tolist() == []
    assert take(cache, array(1, 6, 1, 0, 999_999)).tolist() == [1, 1, 999_999]
    assert take(cache, array()).tolist() == []


def test_an_empty_cache_has_nothing_not_even_row_0(cache: RowCache) -> None:
    assert take(cache, array(0, 1, 999_999)).tolist() == [0, 1, 999_999]
    assert list(cache.held()) == []


def test_more_ids_than_are_handled_at_once(cache: RowCache) -> None:
    ids = np.random.default_rng(1).permutation(20_000)
    keep(cache, ids)
    assert take(cache, ids).tolist() == []
    assert take(cache, np.arange(10_000, 30_000)).tolist() == list(range(20_000, 30_000))


def test_rows_that_are_larger_than_what_is_handled_at_once() -> None:
    cache = RowCache(1000, 3 << 20, 64 << 20)
    rows = np.arange(1, 4, dtype=np.uint8)[:, None].repeat(3 << 20, axis=1)
    cache.insert(array(7, 9, 500), rows)
    out = np.empty((4, 3 << 20), np.uint8)
    assert cache.take(array(500, 8, 7, 9), out).tolist() == [1]
    assert out[[0, 2, 3], -1].tolist() == [3, 1, 2]


def test_ids_of_32_bits_and_more() -> None:
    for rows in (2**32 - 1, 2**32, 2**45):
        cache = RowCache(rows, ROW_BYTES, 1 << 20)
        ids = array(0, 1, 2**31, rows // 2, rows - 1)
        keep(cache, ids)
        assert take(cache, ids).tolist() == []
        assert take(cache, (ids + 3) % rows).tolist() == ((ids + 3) % rows).tolist()


def test_rows_of_one_set_push_out_those_used_the_longest_ago() -> None:
    cache = RowCache(1_000_000, ROW_BYTES, 8 * PLACE_BYTES)  # one set
    for row in range(8):
        keep(cache, array(row))
    take(cache, array(0, 3))
    keep(cache, np.arange(100, 106))
    assert take(cache, array(0, 3)).tolist() == []
    assert take(cache, np.arange(8)).tolist() == [1, 2, 4, 5, 6, 7]
    assert cache.stats().evicted == 6


def test_rows_beyond_a_set_at_once_are_left_out() -> None:
    cache = RowCache(1_000_000, ROW_BYTES, 8 * PLACE_BYTES)
    keep(cache, np.arange(50))
    assert len(take(cache, np.arange(50))) == 42
    assert cache.stats().rows == 8


def test_uses_are_told_apart_however_many_epochs_have_passed() -> None:
    cache = RowCache(1_000_000, ROW_BYTES, 8 * PLACE_BYTES)
    keep(cache, array(5))
    for row in range(100, 1000):
        take(cache, array(5))
        keep(cache, array(row))
    assert take(cache, array(5)).tolist() == []
    assert take(cache, np.arange(994, 1000)).tolist() == []


def test_rows_that_are_held_already_are_not_held_twice(cache: RowCache) -> None:
    keep(cache, np.arange(100))
    keep(cache, np.arange(50, 150))
    stats = cache.stats()
    assert (stats.rows, stats.inserted, stats.evicted) == (150, 150, 0)


def test_the_budget_is_kept_and_used() -> None:
    for budget in (8 * PLACE_BYTES, 100_000, 1 << 20):
        cache = RowCache(1_000_000, ROW_BYTES, budget)
        stats = cache.stats()
        assert budget - 8 * PLACE_BYTES < stats.memory_bytes <= budget
        assert stats.capacity_rows * PLACE_BYTES == stats.memory_bytes
        keep(cache, np.arange(80_000))
        assert 0.9 * stats.capacity_rows < cache.stats().rows <= stats.capacity_rows


def test_a_small_table_takes_less_than_the_budget() -> None:
    cache = RowCache(4000, ROW_BYTES, 1 << 30)
    assert cache.stats().memory_bytes <= 8000 * PLACE_BYTES
    keep(cache, np.arange(4000))
    assert cache.stats().rows > 3900
    assert RowCache(1, ROW_BYTES, 1 << 30).stats().capacity_rows == 8


def test_a_budget_that_holds_no_set_is_refused_with_what_would_do() -> None:
    with pytest.raises(NeverFits, match=r"row_cache is 231 B, and 8 rows of 24 bytes, .* take 232 bytes: raise it"):
        RowCache(1_000_000, ROW_BYTES, 8 * PLACE_BYTES - 1)


def test_what_is_counted(cache: RowCache) -> None:
    assert cache.stats().hit_rate == 0
    take(cache, np.arange(10))
    keep(cache, np.arange(10))
    take(cache, array(3, 3, 12))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.inserted, stats.rows) == (2, 11, 10, 10)
    assert stats.hit_rate == 2 / 13


def test_closing_frees_the_memory_and_keeps_the_counts(cache: RowCache) -> None:
    keep(cache, np.arange(10))
    take(cache, np.arange(12))
    cache.close()
    stats = cache.stats()
    assert (stats.rows, stats.capacity_rows, stats.memory_bytes) == (0, 0, 0)
    assert (stats.hits, stats.misses, stats.inserted) == (10, 2, 10)
    assert list(cache.held()) == []
    cache.close()


def in_memory(part: Bytes) -> int:
    """OS pages of an array that the kernel has brought."""
    pages = np.zeros(-(-part.nbytes // 4096), np.uint8)
    assert libc().mincore(part.ctypes.data, part.nbytes, pages.ctypes.data) == 0
    return int((pages & 1).sum())


def test_its_memory_is_brought_once_and_changes_nothing() -> None:
    cache = RowCache(10**6, ROW_BYTES, 16 << 20)
    keep(cache, np.arange(1000))
    before = in_memory(cache._rows)
    cache.make_ready()
    populating = cache._populating
    assert populating is not None
    populating.join()
    assert before < in_memory(cache._rows) == -(-cache._rows.nbytes // 4096)
    assert not len(take(cache, np.arange(1000)))
    cache.make_ready()
    assert cache._populating is populating
    cache.close()


def test_closing_waits_for_what_brings_the_memory() -> None:
    cache = RowCache(10**7, ROW_BYTES, 256 << 20)
    cache.make_ready()
    populating = cache._populating
    assert populating is not None
    cache.close()
    assert not populating.is_alive()
    cache.make_ready()
    assert cache._populating is None


@pytest.mark.parametrize("raised", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_cache_does_without_what_brings_the_memory(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> None:
    cache = RowCache(10**6, ROW_BYTES, 1 << 20)

    def refuse(_: threading.Thread) -> None:
        raise raised

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", refuse)
        cache.make_ready()
    keep(cache, np.arange(10))
    assert not len(take(cache, np.arange(10)))
    cache.close()


def test_all_that_is_held_is_listed_once(cache: RowCache) -> None:
    ids = np.random.default_rng(2).choice(1_000_000, 25_000, replace=False)
    keep(cache, ids)
    pieces = list(cache.held())
    held = np.concatenate([piece for piece, _ in pieces])
    assert len(held) == len(np.unique(held)) == cache.stats().rows
    assert np.isin(held, ids).all()
    for some, rows in pieces:
        np.testing.assert_array_equal(rows, rows_of(some))


@settings(max_examples=60, deadline=None)
@given(
    sets=st.integers(1, 6),
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 199), max_size=40)), max_size=40),
)
def test_never_another_row_and_never_one_that_was_not_kept(sets: int, steps: list[tuple[bool, list[int]]]) -> None:
    """Against a dict of all that was ever kept: the cache has part of it."""
    cache = RowCache(200, ROW_BYTES, sets * 8 * PLACE_BYTES)
    ever: set[int] = set()
    for inserts, listed in steps:
        ids = np.array(listed, np.int64)
        if inserts:
            ids = np.unique(ids)
            keep(cache, ids)
            ever.update(ids.tolist())
        else:
            missing = take(cache, ids)
            assert set(ids.tolist()) - ever <= set(missing.tolist())
        stats = cache.stats()
        assert stats.rows == stats.inserted - stats.evicted <= min(stats.capacity_rows, len(ever))
        if stats.evicted == 0 and stats.inserted == len(ever):
            assert not len(take(cache, np.array(sorted(ever), np.int64)))
    for ids, rows in cache.held():
        assert set(ids.tolist()) <= ever
        np.testing.assert_array_equal(rows, rows_of(ids))


def test_threads_never_see_a_torn_row() -> None:
    """A cache that is much too small, so that every place is rewritten all the time."""
    cache = RowCache(4000, ROW_BYTES, 100 * 8 * PLACE_BYTES)
    start = threading.Barrier(6)

    def work(seed: int) -> int:
        random = np.random.default_rng(seed)
        start.wait()
        for _ in range(60):
            keep(cache, np.unique(take(cache, random.integers(0, 4000, 1500))))
        return sum(len(ids) for ids, rows in cache.held() if (rows == rows_of(ids)).all())

    with ThreadPoolExecutor(6) as pool:
        assert min(pool.map(work, range(6))) > 0
    assert cache.stats().rows <= 800


class Interrupted(np.ndarray):
    """Rows, the writing of which is interrupted, before or after they are written."""

    after = False

    def __setitem__(self, key: object, value: object) -> None:
        if self.after:
            super().__setitem__(key, value)  # type: ignore[index]
        raise KeyboardInterrupt


class InterruptedAfter(Interrupted):
    after = True


@pytest.mark.parametrize("kind", [Interrupted, InterruptedAfter])
def test_an_interrupt_in_the_middle_of_an_insert_leaves_no_wrong_row(kind: type[Interrupted]) -> None:
    cache = RowCache(1000, ROW_BYTES, 4 * 8 * PLACE_BYTES)
    keep(cache, np.arange(100))
    rows = cache._rows
    cache._rows = rows.view(kind)
    with pytest.raises(KeyboardInterrupt):
        keep(cache, np.arange(200, 220))
    cache._rows = rows
    take(cache, np.arange(1000))
    keep(cache, np.arange(200, 220))
    take(cache, np.arange(1000))


def test_a_child_goes_on_with_what_it_inherits_and_leaves_the_parent_alone(cache: RowCache) -> None:
    keep(cache, np.arange(100))

    def check() -> None:
        assert take(cache, np.arange(100)).tolist() == []
        keep(cache, np.arange(100, 200))
        assert take(cache, np.arange(200)).tolist() == []

    run_in_child(check)
    assert take(cache, np.arange(200)).tolist() == list(range(100, 200))


def test_a_child_forked_while_others_insert_has_no_wrong_row() -> None:
    cache = RowCache(4000, ROW_BYTES, 50 * 8 * PLACE_BYTES)
    done = threading.Event()

    def renew_all_the_time() -> None:
        random = np.random.default_rng(3)
        while not done.is_set():
            keep(cache, np.unique(random.integers(0, 4000, 1000)))

    def check() -> None:
        take(cache, np.arange(4000))
        keep(cache, np.arange(1000))
        take(cache, np.arange(4000))

    with ThreadPoolExecutor(1) as pool:
        inserting = pool.submit(renew_all_the_time)
        try:
            for _ in range(10):
                run_in_child(check, limit_s=10)
        finally:
            done.set()
        inserting.result()
