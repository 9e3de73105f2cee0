"""The row cache of an open table: what it saves, and the file that its rows are kept in."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import (
    CacheStats,
    LazyTable,
    NeverFits,
    NgramHash,
    SettingError,
    TableCache,
    TableError,
    TableSpec,
    open_table,
)
from lazyio.fetchers.conformance import MadeTable, run_in_child, write_rows

MIB = 1 << 20
ROWS = 4201
OpenDouble = Callable[..., LazyTable]


@pytest.fixture
def open_cached(open_double: OpenDouble) -> OpenDouble:
    """Opens a table that the double reads, with a row cache."""
    return lambda spec, **more: open_double(spec, **{"cache_bytes": 4 * MIB, **more})


@pytest.fixture
def cached(spec: TableSpec, open_cached: OpenDouble) -> Any:
    with open_cached(spec) as table:
        yield table


@pytest.fixture
def saved(cached: LazyTable, tmp_path: Path) -> str:
    """A file of 500 rows of the table."""
    cached.gather(np.arange(0, 1000, 2))
    path = str(tmp_path / "hot.rows")
    assert cache_of(cached).save(path) == 500
    return path


def cache_of(table: LazyTable) -> TableCache:
    assert table.cache is not None
    return table.cache


def stats_of(table: LazyTable) -> CacheStats:
    return cache_of(table).stats()


# --- gathers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 16, 64, 65, 3000])
def test_what_was_read_once_is_not_read_again(cached: LazyTable, made: MadeTable, count: int) -> None:
    ids = np.random.default_rng(count).integers(0, ROWS, count)
    np.testing.assert_array_equal(cached.gather(ids), made.content[ids])
    did = cached.stats()
    assert (did.cache_hits, did.unique_rows) == (0, len(np.unique(ids)))
    np.testing.assert_array_equal(cached.gather(ids), made.content[ids])
    again = cached.stats() - did
    assert (again.rows, again.cache_hits, again.unique_rows, again.reads) == (count, count, 0, 0)


def test_only_what_is_not_held_is_read_each_row_once(cached: LazyTable, made: MadeTable) -> None:
    cached.gather(np.arange(0, ROWS, 2))
    before = cached.stats()
    ids = np.random.default_rng(1).permutation(np.repeat(np.arange(ROWS), 3)).reshape(3, -1)
    np.testing.assert_array_equal(cached.gather(ids), made.content[ids])
    did = cached.stats() - before
    assert did.cache_hits == 3 * len(range(0, ROWS, 2))
    assert did.unique_rows == len(range(1, ROWS, 2))


def test_gather_unique_and_tickets_share_the_cache(cached: LazyTable, made: MadeTable) -> None:
    ids = np.random.default_rng(2).integers(0, ROWS, 500)
    cached.gather(ids[:200])
    packed, inverse = cached.gather_unique(ids)
    np.testing.assert_array_equal(packed[inverse], made.content[ids])
    did = cached.stats()
    packed, inverse = cached.prefetch(ids).result()
    np.testing.assert_array_equal(packed[inverse], made.content[ids])
    after = cached.stats() - did
    assert (after.reads, after.cache_hits) == (0, len(np.unique(ids)))


@pytest.mark.parametrize("cache_bytes", [8 * 95, 20_000, 4 * MIB])
@pytest.mark.parametrize("budget_bytes", [2 * MIB, 64 * MIB])
def test_rows_are_right_whatever_has_room(
    spec: TableSpec, open_cached: OpenDouble, made: MadeTable, cache_bytes: int, budget_bytes: int
) -> None:
    random = np.random.default_rng(3)
    with open_cached(spec, cache_bytes=cache_bytes, budget_bytes=budget_bytes) as table:
        for count in (3, 2000, 16, 12_000, 700):
            ids = random.integers(0, ROWS, count)
            np.testing.assert_array_equal(table.gather(ids), made.content[ids])
            packed, inverse = table.gather_unique(ids)
            np.testing.assert_array_equal(packed[inverse], made.content[ids])
        assert stats_of(table).memory_bytes <= cache_bytes
        assert table._staging.held_bytes() <= budget_bytes


def test_threads_share_a_cache_that_is_too_small(spec: TableSpec, open_cached: OpenDouble, made: MadeTable) -> None:
    with open_cached(spec, cache_bytes=50_000) as table, ThreadPoolExecutor(4) as pool:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for count in (16, 900, 40, 2500):
                ids = random.integers(0, ROWS, count)
                np.testing.assert_array_equal(table.gather(ids), made.content[ids])

        list(pool.map(work, range(8)))


def test_a_child_goes_on_with_the_rows_of_its_parent(cached: LazyTable, made: MadeTable) -> None:
    ids = np.arange(0, ROWS, 5)
    cached.gather(ids)

    def check() -> None:
        before = cached.stats()
        np.testing.assert_array_equal(cached.gather(ids), made.content[ids])
        assert (cached.stats() - before).reads == 0
        np.testing.assert_array_equal(cached.gather(ids[:-1] + 1), made.content[ids[:-1] + 1])

    run_in_child(check)


def test_a_read_that_failed_leaves_nothing_in_the_cache(
    cached: LazyTable, made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 1 / 0)
        for count in (10, 1000):
            with pytest.raises(ZeroDivisionError):
                cached.gather(np.arange(count))
    assert stats_of(cached).rows == 0
    np.testing.assert_array_equal(cached.gather(np.arange(1000)), made.content[:1000])


def test_edited_rows_go_over_what_is_held(spec: TableSpec, open_double: OpenDouble, made: MadeTable) -> None:
    edit = bytes(range(90))
    with open_table(spec, mode="uring", direct_io="off", row_cache="1MiB", overlay={7: edit}) as table:
        for _ in range(2):
            assert table.gather([7, 8])[0].tobytes() == edit
            assert table.gather([7, 8])[1].tobytes() == made.content[8].tobytes()


# --- the setting -----------------------------------------------------------------------------------------------------


def test_there_is_a_cache_where_reads_bypass_the_page_cache(way: str, open_way: Any, spec: TableSpec) -> None:
    with open_way(spec) as table:
        assert (table.cache is not None) == table.backend.direct_io


def test_a_cache_can_be_had_and_left_out(spec: TableSpec, made: MadeTable) -> None:
    with open_table(spec, mode="on-direct", direct_io="off", row_cache="1MiB") as table:
        table.gather(np.arange(ROWS))
        assert 0 < stats_of(table).memory_bytes <= MIB
        assert table.stats().reads > 0
    with open_table(spec, mode="on-direct", row_cache=0) as table:
        assert table.cache is None


@pytest.mark.parametrize("mode", ["off", "on", "on-bare", "mmap"])
def test_a_cache_where_there_can_be_none_is_refused(spec: TableSpec, mode: str) -> None:
    with pytest.raises(SettingError, match=f"row_cache has no effect in mode {mode}, only in auto, uring, on-direct"):
        open_table(spec, mode=mode, row_cache="64MiB")


def test_rows_too_large_for_the_cache_are_refused_and_leave_nothing_open(
    tmp_path: Path, open_cached: OpenDouble, make_spec: Callable[[MadeTable], TableSpec]
) -> None:
    spec = make_spec(write_rows(tmp_path, 1 << 19, [("large", 0, 3)]))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NeverFits, match=r"8 rows of 524288 bytes, the least it can hold, take \d+ bytes"):
        open_cached(spec)
    assert len(os.listdir("/proc/self/fd")) == before


# --- the file --------------------------------------------------------------------------------------------------------


def test_loaded_rows_need_no_reads(saved: str, spec: TableSpec, open_cached: OpenDouble, made: MadeTable) -> None:
    with open_cached(spec) as table:
        assert cache_of(table).load(saved) == 500
        before = table.stats()
        assert before.gathers == 0
        ids = np.arange(0, 1000, 2)
        np.testing.assert_array_equal(table.gather(ids), made.content[ids])
        assert (table.stats() - before).reads == 0


def test_a_table_that_lies_elsewhere_and_is_cut_otherwise_is_the_same(
    saved: str, made: MadeTable, tmp_path: Path, open_cached: OpenDouble, make_spec: Callable[[MadeTable], TableSpec]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "whole"
    path.write_bytes(made.content.tobytes())
    extent = replace(made.extents[0], path=str(path), offset=0, first_row=0, rows=ROWS)
    with open_cached(replace(make_spec(made), path=str(path), extents=(extent,))) as table:
        assert cache_of(table).load(saved) == 500


def test_a_smaller_cache_takes_what_it_can(saved: str, spec: TableSpec, open_cached: OpenDouble) -> None:
    with open_cached(spec, cache_bytes=20_000) as table:
        assert cache_of(table).load(saved) == 500
        assert 200 < stats_of(table).rows <= 210


NGRAM = NgramHash((1, 3), (2000, 2201), (0, 2000), 2, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": "others"}, "of one with tensor rows, where this one has others; save it anew"),
        ({"dtype": "Q8_0"}, "of one with dtype U8, where this one has Q8_0"),
        ({"scale": 0.5}, "of one with other contents"),
        ({"ngram": NGRAM}, "of one with other contents"),
    ],
)
def test_the_file_of_another_table_is_refused(
    saved: str, spec: TableSpec, open_cached: OpenDouble, change: dict[str, Any], message: str
) -> None:
    with open_cached(replace(spec, **change)) as table:
        with pytest.raises(TableError, match=message):
            cache_of(table).load(saved)
        assert stats_of(table).rows == 0


def test_the_file_of_a_table_with_other_rows_is_refused(
    saved: str, tmp_path: Path, open_cached: OpenDouble, make_spec: Callable[[MadeTable], TableSpec]
) -> None:
    (tmp_path / "other").mkdir()
    for row_bytes, rows, message in (
        (90, 4201, "other contents"),
        (90, 4200, "rows 4201, where this one has 4200"),
        (91, 4201, "row_bytes 90, where this one has 91"),
    ):
        made = write_rows(tmp_path / "other", row_bytes, [(f"o{rows}{row_bytes}", 3, rows)])
        made.content[:] = 1
        Path(made.extents[0].path).write_bytes(b"abc" + made.content.tobytes())
        with open_cached(make_spec(made)) as table:
            with pytest.raises(
                TableError, match=rf"hot\.rows has rows of another table than .*: of one with {message}"
            ):
                cache_of(table).load(saved)
            assert stats_of(table).rows == 0


@pytest.mark.parametrize("place", [3, 9, 200, -1, -30_000])
def test_a_damaged_file_is_refused_and_nothing_of_it_is_taken(
    saved: str, spec: TableSpec, open_cached: OpenDouble, place: int
) -> None:
    content = bytearray(Path(saved).read_bytes())
    content[place] ^= 1
    Path(saved).write_bytes(content)
    with open_cached(spec) as table:
        with pytest.raises(TableError, match=r"hot\.rows"):
            cache_of(table).load(saved)
        assert stats_of(table).rows == 0


def test_saving_and_loading_go_on_while_others_gather(
    spec: TableSpec, open_cached: OpenDouble, made: MadeTable, tmp_path: Path
) -> None:
    with open_cached(spec, cache_bytes=100_000) as table, ThreadPoolExecutor(2) as pool:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(15):
                ids = random.integers(0, ROWS, 1500)
                np.testing.assert_array_equal(table.gather(ids), made.content[ids])

        gathering = [pool.submit(work, seed) for seed in range(2)]
        for number in range(5):
            count = cache_of(table).save(tmp_path / f"hot{number}")
            assert cache_of(table).load(tmp_path / f"hot{number}") == count
        for future in gathering:
            future.result()


def test_a_closed_table_says_so(spec: TableSpec, open_cached: OpenDouble, saved: str) -> None:
    table = open_cached(spec)
    table.close()
    for use in (cache_of(table).load, cache_of(table).save):
        with pytest.raises(TableError, match="the table is closed"):
            use(saved)
    assert stats_of(table).memory_bytes == 0


def test_a_table_without_a_cache_has_none(double: LazyTable) -> None:
    assert double.cache is None
    double.gather([1, 1])
    assert double.stats().cache_hits == 0
