import errno

import numpy as np
import pytest

from lazyio.errors import ReadError, Unsupported
from lazyio.fetchers import Fetcher, FetcherOptions, load
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.fetchers.faults import Faults
from lazyio.fetchers.faulty_kernel import with_faulty_kernel

POISON = 0x5A
WAYS = [(name, direct) for name in ("uring", "pread") for direct in ("on", "off")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeTable:
    return write_rows(tmp_path_factory.mktemp("kernel"), 700, [("a", 77, 1000), ("b", 5, 200)])


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def open_faulty(made: MadeTable, way: tuple[str, str], faults: Faults) -> Fetcher:
    name, direct = way
    try:
        return with_faulty_kernel(
            load(name)(made.extents, made.row_bytes, FetcherOptions(direct_io=direct, queue_depth=50)), faults
        )
    except Unsupported as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize("kind", ["short", "eintr", "eagain"])
def test_what_is_transient_is_made_good(made: MadeTable, way: tuple[str, str], kind: str) -> None:
    ids = np.arange(0, 1200, 3)
    with open_faulty(made, way, Faults(**{kind: 0.2})) as fetcher:
        plan = made.plan(fetcher, ids)
        buffer = aligned(plan.reads.buffer_bytes)
        stats = fetcher.read(plan.reads, buffer)
        assert 40 < stats.resumed < 300
        np.testing.assert_array_equal(buffer[plan.position[:, None] + np.arange(700)], made.content[ids])


def test_eio_is_an_error_and_its_bytes_are_not_read(made: MadeTable, way: tuple[str, str]) -> None:
    with open_faulty(made, way, Faults(eio=1)) as fetcher:
        plan = made.plan(fetcher, np.arange(0, 1200, 3)).reads
        buffer = aligned(plan.buffer_bytes)
        with pytest.raises(ReadError, match="Input/output error") as raised:
            fetcher.read(plan, buffer)
        assert (raised.value.errno, raised.value.got) == (errno.EIO, None)
        assert raised.value.path == made.extents[0].path
        assert raised.value.offset in plan.offset
        assert (buffer == POISON).all()


@pytest.mark.parametrize("kind", ["eintr", "eagain"])
def test_what_is_denied_for_ever_is_an_error(made: MadeTable, way: tuple[str, str], kind: str) -> None:
    with open_faulty(made, way, Faults(**{kind: 1})) as fetcher:
        plan = made.plan(fetcher, np.arange(0, 1200, 3)).reads
        buffer = aligned(plan.buffer_bytes)
        with pytest.raises(ReadError, match=r"failed: .* \(attempt 33\)") as raised:
            fetcher.read(plan, buffer)
        assert raised.value.errno == getattr(errno, kind.upper())
        assert (buffer == POISON).all()


def test_delays_and_another_order_come_on_top(made: MadeTable, way: tuple[str, str]) -> None:
    with open_faulty(made, way, Faults(eintr=0.1, late=0.2, reorder=0.2, delay_s=0.01)) as fetcher:
        plan = made.plan(fetcher, np.arange(0, 1200, 3)).reads
        told: list[int] = []
        stats = fetcher.read(plan, aligned(plan.buffer_bytes), told.append)
        assert told[0] < 50
        assert told[-1] == len(plan)
        assert stats.service_s > 0.01 * 40
        assert stats.resumed > 15


def test_other_fetchers_are_refused(made: MadeTable) -> None:
    with (
        load("resident")(made.extents, made.row_bytes, FetcherOptions()) as fetcher,
        pytest.raises(Unsupported, match="use with_faults around it"),
    ):
        with_faulty_kernel(fetcher, Faults())


def aligned(size: int) -> np.ndarray:
    whole = np.full(size + 4096, POISON, np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + size]
