"""Lookahead: the rows of every ubatch, in order, whatever reads them, and as early as the pipeline allows."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio import LazyTable, Lookahead, ReadError, RowIndexError, SettingError, Unsupported, open_table, plan_cuts
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.ple.cuts import Pace
from lazyio.ple.spec import TableSpec

RANDOM = np.random.default_rng(8)
UBATCHES = [RANDOM.integers(0, 3000, shape) for shape in ((4, 16), (40, 16), 300, 0, 1000, 1)]
MODES: list[dict[str, Any]] = [
    {"mode": "off", "reserve": 0},
    {"mode": "on"},
    {"mode": "on-bare"},
    {"mode": "on-direct"},
    {"mode": "uring", "direct_io": "on"},
    {"mode": "uring", "direct_io": "off"},
]


@pytest.fixture
def made(tmp_path: Path) -> MadeTable:
    return write_rows(tmp_path, 90, [("rows", 77, 3000)])


@pytest.fixture
def spec(made: MadeTable) -> TableSpec:
    return TableSpec(
        path=made.extents[0].path,
        tensor="rows",
        dtype="U8",
        rows=3000,
        row_values=90,
        row_bytes=90,
        extents=made.extents,
    )


def wait_for_gathers(table: LazyTable, number: int) -> None:
    deadline = time.monotonic() + 30
    while table.stats().gathers < number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 10])
@pytest.mark.parametrize("arguments", MODES, ids=str)
def test_rows_are_those_of_gather(spec: TableSpec, made: MadeTable, arguments: dict[str, Any], depth: int) -> None:
    try:
        table = open_table(spec, strict=True, **arguments)
    except Unsupported as refused:
        pytest.skip(str(refused))
    with table:
        seen = 0
        for ids, (rows, inverse) in zip(UBATCHES, Lookahead(table, UBATCHES, depth=depth), strict=True):
            np.testing.assert_array_equal(rows[inverse], made.content[ids])
            np.testing.assert_array_equal(rows, made.content[np.unique(ids)])
            seen += 1
        assert seen == len(UBATCHES)


def test_rows_in_flight_are_read_once(spec: TableSpec, made: MadeTable) -> None:
    asked = [np.arange(start, start + 500) for start in (0, 250, 100, 400)]
    with open_table(spec, mode="on-direct", direct_io="on") as table:
        ahead = Lookahead(table, asked, depth=4)
        wait_for_gathers(table, 4)
        for ids, (rows, inverse) in zip(asked, ahead, strict=True):
            np.testing.assert_array_equal(rows[inverse], made.content[ids])
        assert table.stats().unique_rows == 900
        assert table.stats().lent_rows == 1100


def test_reading_starts_at_once_and_no_further_than_asked(spec: TableSpec) -> None:
    taken: list[int] = []

    def ubatches() -> Iterator[np.ndarray]:
        for number in range(6):
            taken.append(number)
            yield np.array([number])

    with open_table(spec, mode="on") as table:
        ahead = Lookahead(table, ubatches(), depth=2)
        assert taken == [0, 1]
        next(ahead)
        assert taken == [0, 1, 2]
        assert len(list(ahead)) == 5
        with pytest.raises(StopIteration):
            next(ahead)


def test_a_wrong_ubatch_is_an_error_at_its_turn(spec: TableSpec, made: MadeTable) -> None:
    with open_table(spec, mode="on") as table:
        ahead = Lookahead(table, [[1], [2], [3000], [4]], depth=4)
        for row in (1, 2):
            np.testing.assert_array_equal(next(ahead)[0], made.content[[row]])
        with pytest.raises(RowIndexError, match="row 3000"):
            next(ahead)
        assert list(ahead) == []


def test_a_failed_read_is_an_error_at_its_turn(spec: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_table(spec, mode="on-direct", direct_io="on") as table:
        real, calls = table._fetcher.read, [0]

        def fail_second(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise ReadError("the disk is gone", path="a", offset=0, wanted=90, got=None)
            return real(*arguments)

        monkeypatch.setattr(table._fetcher, "read", fail_second)
        ahead = Lookahead(table, [[1], [2], [3]])
        next(ahead)
        with pytest.raises(ReadError, match="the disk is gone"):
            next(ahead)
        assert len(list(ahead)) == 1


def test_leaving_early_cancels_what_is_in_flight(spec: TableSpec) -> None:
    with open_table(spec, mode="on-direct") as table:
        with Lookahead(table, UBATCHES * 10, depth=20) as ahead:
            next(ahead)
        assert list(ahead) == []
        table.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "lazyio prefetch"]
        assert table.stats().gathers < 20


def test_closing_makes_room_for_others(spec: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyio.prefetch._IDLE_S", 1000)
    with open_table(spec, mode="on", budget="1MiB") as table:
        ahead = Lookahead(table, [np.arange(2000)])
        wait_for_gathers(table, 1)
        other = table.prefetch(np.arange(2000))
        time.sleep(0.02)
        assert not other.done()
        ahead.close()
        wait_for_gathers(table, 2)
        assert len(other.result()[0]) == 2000


def test_a_depth_of_nothing_is_refused(spec: TableSpec) -> None:
    with open_table(spec, mode="on") as table, pytest.raises(SettingError, match="depth is 0"):
        Lookahead(table, [[1]], depth=0)


# --- by a clock that only the pipeline moves -------------------------------------------------------------------------


class FakeTable:
    """One device that reads a ubatch after the other, and a clock that stands still while nobody waits."""

    def __init__(self, read_s: Callable[[int], float]) -> None:
        self.now_s = self.device_free_s = 0.0
        self._read_s = read_s

    def prefetch(self, ids: Any) -> "FakeTicket":
        self.device_free_s = max(self.device_free_s, self.now_s) + self._read_s(len(ids))
        return FakeTicket(self, self.device_free_s)


class FakeTicket:
    def __init__(self, table: FakeTable, ready_s: float) -> None:
        self._table, self._ready_s = table, ready_s

    def result(self) -> tuple[None, None]:
        self._table.now_s = max(self._table.now_s, self._ready_s)
        return None, None


def simulated_s(pace: Pace, cuts: list[int], depth: int) -> float:
    table: Any = FakeTable(lambda tokens: pace.reads_s([tokens])[0])
    for tokens, _ in zip(cuts, Lookahead(table, [range(tokens) for tokens in cuts], depth=depth), strict=True):
        table.now_s += pace.computes_s([tokens])[0]
    return float(table.now_s)


PACES = {
    "balanced": (13.4, 90e3, 6e3),
    "slow trunk": (13.4, 90e3, 2e3),
    "slow disk": (13.4, 30e3, 6e3),
}


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("tokens", [512, 2048, 20_000])
def test_a_prompt_takes_what_the_pipeline_allows(name: str, tokens: int) -> None:
    reads, limit, rate = PACES[name]
    pace = Pace(reads / limit, 1 / rate, 0.5e-3, 2e-3)
    cuts = plan_cuts(tokens, reads, limit, rate, 2048)
    assert simulated_s(pace, cuts, len(cuts)) == pytest.approx(pace.makespan_s(cuts))
    # The usual depth costs next to nothing beside reading arbitrarily far ahead.
    assert simulated_s(pace, cuts, 2) < 1.01 * pace.makespan_s(cuts)


def test_planned_cuts_hide_the_reads_of_a_short_prompt() -> None:
    pace = Pace(13.4 / 90e3, 1 / 6e3, 0.5e-3, 2e-3)
    one, planned = [2048], plan_cuts(2048, 13.4, 90e3, 6e3, 2048)
    floor = max(sum(pace.reads_s(one)), sum(pace.computes_s(one)))
    assert simulated_s(pace, one, 2) > 1.85 * floor
    assert simulated_s(pace, planned, 2) < 1.15 * floor


def test_the_next_ubatch_is_read_while_this_one_computes(spec: TableSpec) -> None:
    with open_table(spec, mode="on-direct", direct_io="on") as table:
        ahead = Lookahead(table, [[1], [2], [3]], depth=2)
        next(ahead)
        wait_for_gathers(table, 3)
        assert len(list(ahead)) == 2
