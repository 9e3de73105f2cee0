"""Rows on their way into memory: read once each, within the budget, however many are asked for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import LazyTable, NeverFits, TableSpec, open_table, raw_table, rows
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.staged import FEW_IDS

MIB = 1 << 20
RANDOM = np.random.default_rng(12)


def fetcher_of(table: LazyTable) -> Any:
    return table._fetcher


@pytest.mark.parametrize("steps", [None, [], [1], [1500], [10, 1400, 4200]])
def test_rows_are_taken_out_as_windows_land(double: LazyTable, made: MadeTable, steps: list[int] | None) -> None:
    fetcher_of(double).steps = steps
    ids = np.arange(0, 4201, 2)
    np.testing.assert_array_equal(double.gather(ids), made.content[ids])


def test_the_rows_of_a_decode_step_are_read_at_once(double: LazyTable) -> None:
    double.gather(np.arange(0, 4201, 280))
    assert [len(plan) for plan in fetcher_of(double).plans] == [16]


def test_each_distinct_row_is_read_once(double: LazyTable) -> None:
    double.gather([7] * 8192)
    double.gather([4000, 3, 4000, 100, 3])
    double.gather_unique([9, 9, 9])
    assert [len(plan) for plan in fetcher_of(double).plans] == [1, 3, 1]
    assert [plan.buffer_bytes for plan in fetcher_of(double).plans] == [90, 270, 90]


@pytest.mark.parametrize("arguments", [{"mode": "uring"}, {"mode": "on-direct"}])
@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_a_gather_of_any_length_keeps_to_the_budget(tmp_path: Path, arguments: dict[str, Any], direct_io: str) -> None:
    content = write_rows(tmp_path, 90, [("long", 55, 30_000)]).content
    spec = raw_table(tmp_path / "long", row_bytes=90, offset=55)
    with open_table(spec, budget="1MiB", direct_io=direct_io, row_cache=0, **arguments) as table:
        for ids in (
            RANDOM.integers(0, 30_000, 40_000),
            np.arange(30_000),
            np.arange(1000).repeat(30),
            np.arange(0, 30_000, 13),
        ):
            before = table.stats()
            np.testing.assert_array_equal(table.gather(ids), content[ids])
            rows, inverse = table.gather_unique(ids)
            np.testing.assert_array_equal(rows[inverse], content[ids])
            did = table.stats() - before
            assert did.rows == 2 * len(ids)
            if direct_io == "on" and table.backend.direct_io:
                assert did.unique_rows == 2 * len(np.unique(ids))
            assert 0 < table._staging.held_bytes() <= MIB


@pytest.mark.parametrize("count", [16, 64, 65])
def test_a_few_long_rows_keep_to_the_budget_too(
    tmp_path: Path, open_double: Callable[..., LazyTable], count: int
) -> None:
    content = write_rows(tmp_path, 100_000, [("long", 55, 80)]).content
    ids = RANDOM.choice(80, count, replace=False)
    with open_double(raw_table(tmp_path / "long", row_bytes=100_000, offset=55), budget_bytes=MIB) as table:
        np.testing.assert_array_equal(table.gather(ids), content[ids])
        rows, inverse = table.gather_unique(ids)
        np.testing.assert_array_equal(rows[inverse], content[ids])
        assert 0 < table._staging.held_bytes() <= MIB


def test_a_row_that_the_budget_can_not_hold_is_refused_with_the_setting(
    tmp_path: Path, open_double: Callable[..., LazyTable]
) -> None:
    write_rows(tmp_path, 3 * MIB, [("rows", 0, 2)])
    with open_double(raw_table(tmp_path / "rows", row_bytes=3 * MIB), budget_bytes=2 * MIB) as table:
        for gather in (table.gather, table.gather_unique):
            with pytest.raises(NeverFits, match=r"the budget has 1\.4 MiB for that: raise budget"):
                gather([0])


def test_threads_share_a_budget_that_holds_one_of_them(tmp_path: Path) -> None:
    content = write_rows(tmp_path, 90, [("long", 55, 30_000)]).content
    spec = raw_table(tmp_path / "long", row_bytes=90, offset=55)
    with open_table(spec, mode="on-direct", budget="1MiB") as table, ThreadPoolExecutor(4) as pool:

        def work(seed: int) -> None:
            ids = np.random.default_rng(seed).integers(0, 30_000, 5000)
            np.testing.assert_array_equal(table.gather(ids), content[ids])

        list(pool.map(work, range(8)))


@pytest.mark.parametrize("count", [1, 16, FEW_IDS, FEW_IDS + 1, 400, 4000])
@pytest.mark.parametrize("budget", [MIB, 64 * MIB])
def test_few_many_and_very_many_rows(
    spec: TableSpec, made: MadeTable, open_double: Callable[..., LazyTable], count: int, budget: int
) -> None:
    """Which are planned in three ways; where one ends and the next begins depends on the budget."""
    ids = RANDOM.integers(0, 4201, count)
    with open_double(spec, budget_bytes=budget) as table:
        np.testing.assert_array_equal(table.gather(ids), made.content[ids])
        assert table.stats().unique_rows == len(np.unique(ids))
        assert table.stats().bytes_read == 90 * len(np.unique(ids))


def test_files_that_can_not_be_mapped_are_read_each_time(
    spec: TableSpec, made: MadeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no maps here")

    monkeypatch.setattr(rows, "MappedRows", refuse)
    with open_table(spec, mode="on-direct", direct_io="off") as table:
        for _ in range(2):
            before = table.stats()
            np.testing.assert_array_equal(table.gather([3000, 5, 5]), made.content[[3000, 5, 5]])
            assert (table.stats() - before).reads == 2


def test_what_was_read_through_the_page_cache_is_not_read_again(spec: TableSpec, made: MadeTable) -> None:
    ids = np.arange(0, 4201, 3)
    with open_table(spec, mode="on-direct", direct_io="off") as table:
        table.gather([7] * 5000)
        assert (table.stats().reads, table.stats().bytes_read) == (1, 90)
        np.testing.assert_array_equal(table.gather(ids), made.content[ids])
        before = table.stats()
        np.testing.assert_array_equal(table.gather(ids[::-1]), made.content[ids[::-1]])
        assert (table.stats() - before).reads == 0
