"""Tables whose files change, whose gathers are interrupted, and whose process forks."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import LazyTable, ReadError, TableSpec
from lazyio.fetchers import RowFetcher
from lazyio.fetchers.conformance import MadeTable, run_in_child

OpenWay = Callable[..., LazyTable]

CUT = 40_000  # where file b is truncated: rows 2,444 and on lose bytes
KEPT, LOST = np.arange(2000, 2444), np.arange(2000, 3500)


@pytest.fixture(autouse=True)
def _written_long_ago(made: MadeTable) -> None:
    """So that a change a moment later shows in the time of the last one."""
    for extent in made.extents:
        os.utime(extent.path, ns=(0, 0))


def gather_right_or_not_at_all(table: LazyTable, made: MadeTable, ids: np.ndarray) -> ReadError | None:
    try:
        rows = table.gather(ids)
    except ReadError as error:
        return error
    np.testing.assert_array_equal(rows, made.content[ids])
    return None


# --- files that change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [True, False])
def test_a_truncated_file_is_an_error_with_its_numbers(
    open_way: OpenWay, way: str, spec: TableSpec, made: MadeTable, tmp_path: Path, used: bool
) -> None:
    """In a child, because a map that was touched without a look at its file would kill the process."""
    with open_way(spec) as table:
        if used:
            table.gather(np.arange(4201))
        os.truncate(tmp_path / "b", CUT)

        def check() -> None:
            error = gather_right_or_not_at_all(table, made, LOST)
            if way == "off":
                assert error is None
                return
            assert error is not None
            assert error.path == str(tmp_path / "b")
            assert (error.wanted, error.got) == (135_003, CUT)
            assert "b changed after the table was opened: it is 40000 bytes long now and was 135003" in str(error)
            # What lies in other files can still be had.
            assert gather_right_or_not_at_all(table, made, np.arange(100)) is None

        run_in_child(check)


@pytest.mark.parametrize("way", ["on, safe", "on-direct", "uring"])
def test_a_file_that_is_truncated_during_a_gather_is_an_error(
    open_way: OpenWay, spec: TableSpec, made: MadeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look at the file, that is, as if it had been truncated just then."""
    with open_way(spec) as table:
        fetcher: Any = table._fetcher
        monkeypatch.setattr(fetcher.files, "check", lambda number: None)
        os.truncate(tmp_path / "b", CUT)

        def check() -> None:
            assert gather_right_or_not_at_all(table, made, KEPT[:-50]) is None
            error = gather_right_or_not_at_all(table, made, LOST)
            assert error is not None
            assert error.path == str(tmp_path / "b")
            assert error.got is not None
            assert error.got < error.wanted

        run_in_child(check)


def test_a_file_that_was_rewritten_in_place_is_an_error(
    open_way: OpenWay, way: str, spec: TableSpec, made: MadeTable, tmp_path: Path
) -> None:
    with open_way(spec) as table:
        table.gather([2000])
        with (tmp_path / "b").open("r+b") as file:
            file.seek(3)
            file.write(b"other")
        error = gather_right_or_not_at_all(table, made, np.array([2000]))
        assert (error is None) == (way == "off")
        assert error is None or "b changed after the table was opened: it was written to" in str(error)
    with open_way(spec) as again:
        assert again.gather([2000])[0, :5].tobytes() == b"other"


def test_a_file_that_was_replaced_gives_its_old_rows(
    open_way: OpenWay, spec: TableSpec, made: MadeTable, tmp_path: Path
) -> None:
    with open_way(spec) as table:
        other = tmp_path / "other"
        other.write_bytes(bytes(200_000))
        os.replace(other, tmp_path / "b")
        np.testing.assert_array_equal(table.gather(LOST), made.content[LOST])


def test_a_file_that_grows_is_an_error(
    open_way: OpenWay, way: str, spec: TableSpec, made: MadeTable, tmp_path: Path
) -> None:
    with open_way(spec) as table:
        with (tmp_path / "b").open("ab") as file:
            file.write(b"more")
        error = gather_right_or_not_at_all(table, made, np.array([2000]))
        assert (error is None) == (way == "off")
        assert error is None or "it is 135007 bytes long now" in str(error)


# --- interrupts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[LazyTable], None]:
    """Has the next read of a table be interrupted as if by Ctrl-C, while it is under way or, if it is quick, after."""

    def arrange(table: LazyTable) -> None:
        fetcher, main = table._fetcher, threading.get_ident()
        name = "_take" if isinstance(fetcher, RowFetcher) else "read"
        owner: Any = table._rows if isinstance(fetcher, RowFetcher) else fetcher
        real, begun = getattr(owner, name), threading.Event()

        def read(*arguments: Any) -> Any:
            monkeypatch.undo()
            begun.set()
            real(*arguments)
            time.sleep(30)
            pytest.fail("no interrupt came")

        def interrupt() -> None:
            begun.wait()
            signal.pthread_kill(main, signal.SIGINT)

        monkeypatch.setattr(owner, name, read)
        threading.Thread(target=interrupt, daemon=True).start()

    return arrange


@pytest.mark.parametrize("ids", [np.arange(0, 4201, 2), np.array([5])], ids=["many", "one"])
def test_an_interrupted_gather_leaves_nothing_behind(
    open_way: OpenWay,
    spec: TableSpec,
    made: MadeTable,
    interrupt_reads: Callable[[LazyTable], None],
    ids: np.ndarray,
) -> None:
    with open_way(spec) as table:
        interrupt_reads(table)
        with pytest.raises(KeyboardInterrupt):
            table.gather(ids)
        areas = table._staging._free
        assert not len(table._staging._lent)
        for area in areas:
            area.bytes[:] = 0x5A
        time.sleep(0.02)
        assert all((area.bytes == 0x5A).all() for area in areas), "a read was still in flight"
        np.testing.assert_array_equal(table.gather(np.arange(4201)), made.content)


# --- fork ------------------------------------------------------------------------------------------------------------


def test_a_child_gathers_and_so_does_its_parent_afterwards(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    ids = np.random.default_rng(4).integers(0, 4201, 3000)
    with open_way(spec) as table:
        for _ in range(2):

            def check() -> None:
                np.testing.assert_array_equal(table.gather(ids), made.content[ids])
                np.testing.assert_array_equal(table.gather([7, 7]), made.content[[7, 7]])
                table.close()

            run_in_child(check)
            np.testing.assert_array_equal(table.gather(ids), made.content[ids])


def test_a_child_of_a_parent_whose_threads_gather(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    stop = threading.Event()
    ids = np.random.default_rng(5).integers(0, 4201, 1000)
    with open_way(spec) as table, ThreadPoolExecutor(2) as pool:

        def keep_gathering() -> None:
            while not stop.is_set():
                np.testing.assert_array_equal(table.gather(ids), made.content[ids])

        def check() -> None:
            np.testing.assert_array_equal(table.gather(ids[::-1]), made.content[ids[::-1]])
            table.close()

        gathering = [pool.submit(keep_gathering) for _ in range(2)]
        try:
            for _ in range(4):
                run_in_child(check)
        finally:
            stop.set()
        for each in gathering:
            each.result()


def test_a_child_does_not_wait_for_its_parents_gathers(double: LazyTable, made: MadeTable) -> None:
    """Forked in the middle of one, with a lease of all the staging there is."""
    fetcher: Any = double._fetcher
    fetcher.may_go_on.clear()
    double._staging.budget_bytes = 1 << 20
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(double.gather, np.arange(1000))
        fetcher.reading.wait()

        def check() -> None:
            fetcher.may_go_on = threading.Event()
            fetcher.may_go_on.set()
            np.testing.assert_array_equal(double.gather([1, 2]), made.content[[1, 2]])
            double.close()

        run_in_child(check)
        fetcher.may_go_on.set()
        np.testing.assert_array_equal(gathering.result(), made.content[:1000])
