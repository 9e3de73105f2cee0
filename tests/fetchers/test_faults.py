import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyio.errors import ReadError, SettingError
from lazyio.fetchers import Fetcher, FetcherOptions, load
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.fetchers.faults import Dice, Faults, with_faults

ROWS = 1200
POISON = 0x5A
TRANSIENT = ("short", "eintr", "eagain")

Open = Callable[[Faults], Fetcher]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeTable:
    return write_rows(tmp_path_factory.mktemp("faults"), 90, [("a", 77, 1000), ("b", 5, 200)])


@pytest.fixture(params=["pread", "resident"])
def open_faulty(request: pytest.FixtureRequest, made: MadeTable) -> Iterator[Open]:
    opened: list[Fetcher] = []

    def open_it(faults: Faults) -> Fetcher:
        inner = load(request.param)(made.extents, made.row_bytes, FetcherOptions(direct_io="off"))
        opened.append(with_faults(inner, faults))
        return opened[-1]

    yield open_it
    for fetcher in opened:
        fetcher.close()


class Reading:
    """One read of every other row, so that each has a window of its own."""

    def __init__(self, fetcher: Fetcher, made: MadeTable) -> None:
        self.ids = np.arange(0, ROWS, 2)
        self.plan = made.plan(fetcher, self.ids)
        self.buffer = np.full(self.plan.reads.buffer_bytes, POISON, np.uint8)
        self.told: list[int] = []
        self.stats = fetcher.read(self.plan.reads, self.buffer, self.told.append)
        rows = self.buffer[self.plan.position[:, None] + np.arange(made.row_bytes)]
        np.testing.assert_array_equal(rows, made.content[self.ids])


@pytest.mark.parametrize("kind", TRANSIENT)
def test_what_is_transient_is_made_good(open_faulty: Open, made: MadeTable, kind: str) -> None:
    stats = Reading(open_faulty(Faults(**{kind: 0.2})), made).stats
    assert 60 < stats.resumed < 300


def test_without_faults_nothing_is_read_twice(open_faulty: Open, made: MadeTable) -> None:
    assert Reading(open_faulty(Faults()), made).stats.resumed == 0


def test_eio_is_an_error_that_says_where(open_faulty: Open, made: MadeTable) -> None:
    fetcher = open_faulty(Faults(eio=0.01))
    with pytest.raises(ReadError, match=r"failed: Input/output error") as raised:
        Reading(fetcher, made)
    error = raised.value
    assert (error.errno, error.wanted, error.got) == (errno.EIO, 90, None)
    extent = next(extent for extent in made.extents if extent.path == error.path)
    assert (error.offset - extent.offset) % 90 == 0
    assert 0 <= error.offset - extent.offset < extent.rows * 90


def test_what_is_denied_does_not_reach_the_buffer(made: MadeTable, open_faulty: Open) -> None:
    for faults in (Faults(eintr=1), Faults(eagain=1), Faults(eio=1)):
        fetcher = open_faulty(faults)
        plan = made.plan(fetcher, np.arange(0, ROWS, 2)).reads
        buffer = np.full(plan.buffer_bytes, POISON, np.uint8)
        with pytest.raises(ReadError):
            fetcher.read(plan, buffer)
        assert (buffer == POISON).all()


def test_a_device_that_gives_nothing_is_an_error_after_some_attempts(made: MadeTable, tmp_path: Path) -> None:
    one = write_rows(tmp_path, 1, [("a", 0, 10)])
    inner = load("pread")(one.extents, 1, FetcherOptions(direct_io="off"))
    with with_faults(inner, Faults(short=1)) as fetcher:
        plan = one.plan(fetcher, np.array([3])).reads
        with pytest.raises(ReadError, match=r"wanted 1 bytes and got 0; the device gave no more in 33 attempts"):
            fetcher.read(plan, np.zeros(1, np.uint8))


def test_late_reads_show_in_the_time_of_service(open_faulty: Open, made: MadeTable) -> None:
    stats = Reading(open_faulty(Faults(late=0.1, delay_s=0.002)), made).stats
    assert 30 * 0.002 < stats.service_s < 120 * 0.002 + 1


def test_windows_arrive_in_another_order(made: MadeTable) -> None:
    inner = load("pread")(made.extents, made.row_bytes, FetcherOptions(direct_io="off"))
    with with_faults(inner, Faults(reorder=0.2)) as fetcher:
        told = Reading(fetcher, made).told
    assert len(told) == 2
    assert told[0] < 100
    assert told[1] == ROWS // 2


def test_a_seed_is_enough_to_see_a_run_again(open_faulty: Open, made: MadeTable) -> None:
    faults = Faults.everywhere(0.1, delay_s=0, seed=3)
    runs = [[Reading(fetcher, made).stats.resumed for _ in range(3)] for fetcher in map(open_faulty, [faults] * 2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rate=st.floats(0, 0.2), seed=st.integers(0, 99))
def test_bytes_are_right_at_any_rate(made: MadeTable, rate: float, seed: int) -> None:
    inner = load("pread")(made.extents, made.row_bytes, FetcherOptions(direct_io="off"))
    with with_faults(inner, Faults.everywhere(rate, delay_s=0, seed=seed)) as fetcher:
        Reading(fetcher, made)


def test_faults_compose(made: MadeTable) -> None:
    inner = load("resident")(made.extents, made.row_bytes, FetcherOptions())
    with with_faults(with_faults(inner, Faults(short=0.1)), Faults(eintr=0.1)) as fetcher:
        assert Reading(fetcher, made).stats.resumed > 60


def test_rates_of_results_are_as_asked() -> None:
    dice = Dice(Faults(short=0.1, eintr=0.2, eagain=0.05, eio=0.01))
    results, through = dice.results(dice.for_a_read(), np.full(100_000, 90))
    shares = {code: np.mean(results == -code) for code in (errno.EINTR, errno.EAGAIN, errno.EIO)}
    assert shares == pytest.approx({errno.EINTR: 0.2, errno.EAGAIN: 0.05, errno.EIO: 0.01}, abs=0.005)
    assert through.mean() == pytest.approx(0.64, abs=0.01)
    short = results[~through & (results >= 0)]
    assert (short.min(), short.max()) == (0, 89)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"short": -0.1}, "the rate of short is -0.1; it can be from 0 to 1"),
        ({"late": 1.5}, "the rate of late is 1.5"),
        ({"eio": float("nan")}, "the rate of eio is nan"),
        ({"short": 0.6, "eintr": 0.6}, "add up to more than 1"),
        ({"delay_s": -1}, "delay_s is -1; it must be 0 or more seconds"),
        ({"delay_s": float("nan")}, "delay_s is nan"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
    ],
)
def test_rates_that_are_none_are_refused(rates: dict[str, float], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Faults(**rates)
