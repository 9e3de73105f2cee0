import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyio.errors import ReadError, SettingError, Unsupported
from lazyio.fetchers import Extent, Fetcher, FetcherOptions, ReadPlan, aio, pread
from lazyio.fetchers.conformance import FetcherConformance, run_in_child
from lazyio.fetchers.pread import PreadFetcher

SIZE = 1_200_007  # ends in the middle of a sector
WAYS = ("queued", "ahead", "pooled", "pooled direct")


class PooledFetcher(PreadFetcher):
    """One whose kernel neither queues direct reads nor begins buffered ones."""

    def _goes_on_by_itself(self) -> bool:
        return False

    def _begins_reads(self) -> bool:
        return False


class TestPooledConformance(FetcherConformance):
    options = FetcherOptions(direct_io="off")

    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        fetcher = PooledFetcher(extents, row_bytes, self.options)
        if self.options.direct_io == "on" and not fetcher.direct_io:
            fetcher.close()
            pytest.skip(str(fetcher.fell_back))
        return fetcher


class TestPooledDirectConformance(TestPooledConformance):
    options = FetcherOptions(direct_io="on", workers=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pread") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def open_fetcher(path: Path, way: str, workers: int = 32) -> PreadFetcher:
    options = FetcherOptions(direct_io="on" if way in ("queued", "pooled direct") else "off", workers=workers)
    cls = PooledFetcher if way.startswith("pooled") else PreadFetcher
    fetcher = cls([Extent(str(path), 0, 0, SIZE)], 1, options)
    if fetcher.fell_back or (way == "queued" and not fetcher._queues) or (way == "ahead" and not fetcher._begins):
        fetcher.close()
        pytest.skip(f"{fetcher.fell_back or fetcher.aio_refused}")
    return fetcher


@pytest.fixture(params=WAYS)
def fetcher(path, request):
    with open_fetcher(path, request.param) as fetcher:
        yield fetcher


def make_plan(fetcher: PreadFetcher, wanted: Sequence[tuple[int, int]]) -> ReadPlan:
    """Windows around (offset, length), ascending, rounded outward; those that meet are merged."""
    block = fetcher.alignment.offset
    windows: list[list[int]] = []  # start, stop, end of what is needed
    for offset, length in wanted:
        start, stop, need = offset // block * block, -(-(offset + length) // block) * block, offset + length
        if windows and start < windows[-1][1]:
            windows[-1][1:] = max(stop, windows[-1][1]), max(need, windows[-1][2])
        else:
            windows.append([start, stop, need])
    start, stop, need = np.array(windows, np.int64).reshape(-1, 3).T
    length = stop - start
    dest = np.cumsum(length) - length
    return ReadPlan(np.zeros(len(start), np.int32), start, length, need - start, dest, int(length.sum()))


def scattered(fetcher: PreadFetcher, count: int, length: int = 90) -> ReadPlan:
    offsets = np.sort(np.random.default_rng(count).choice(SIZE - length, count, replace=False))
    return make_plan(fetcher, [(offset, length) for offset in offsets.tolist()])


def make_buffer(plan: ReadPlan) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, plan.buffer_bytes + 4096), np.uint8)


def check(path: Path, plan: ReadPlan, buffer: np.ndarray) -> None:
    content = path.read_bytes()
    for offset, needed, dest in zip(plan.offset.tolist(), plan.needed.tolist(), plan.dest.tolist(), strict=True):
        assert buffer[dest : dest + needed].tobytes() == content[offset : offset + needed]


# --- bytes and counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_any_windows(path, way):
    windows = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 9000)), min_size=1, max_size=80)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(windows, st.sampled_from([1, 2, 5, 32]))
    def any_windows(wanted, workers):
        with open_fetcher(path, way, workers) as fetcher:
            plan = make_plan(fetcher, sorted((offset, min(length, SIZE - offset)) for offset, length in wanted))
            buffer, told = make_buffer(plan), []
            stats = fetcher.read(plan, buffer, told.append)
            check(path, plan, buffer)
            assert stats.reads == len(plan)
            assert stats.resumed == 0
            assert plan.needed.sum() <= stats.bytes_read <= plan.length.sum()
            assert stats.service_s > 0
            assert told == sorted(told)
            assert told[-1] == len(plan)

    any_windows()


def test_plans_longer_than_any_list(path, fetcher):
    plan = scattered(fetcher, 3000, 1)
    buffer = make_buffer(plan)
    fetcher.read(plan, buffer)
    check(path, plan, buffer)


def test_attributes_say_what_is_in_flight(path):
    with open_fetcher(path, "queued", 32) as fetcher:
        assert (fetcher.workers, fetcher.queue_depth, fetcher.direct_io) == (32, 32, True)
    with open_fetcher(path, "ahead", 8) as fetcher:
        assert (fetcher.workers, fetcher.queue_depth, fetcher.direct_io) == (8, 8, False)


@pytest.mark.parametrize("workers", [0, -3])
def test_no_workers_are_refused(path, workers):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SettingError, match=f"workers is set to {workers}"):
        PreadFetcher([Extent(str(path), 0, 0, 1)], 1, FetcherOptions(workers=workers))
    assert len(os.listdir("/proc/self/fd")) == before


# --- how reads overlap -----------------------------------------------------------------------------------------------


def test_few_windows_wake_few_threads(path):
    with open_fetcher(path, "pooled") as fetcher:
        plan = make_plan(fetcher, [(5, 10), (90_000, 10), (200_000, 10)])
        fetcher.read(plan, make_buffer(plan))
        assert sum(thread.name.startswith("lazyio-pread") for thread in threading.enumerate()) <= 3


def test_few_windows_of_a_pool_are_read_at_once(path, monkeypatch):
    together = threading.Barrier(16, timeout=20)
    really = pread._preadv

    def preadv(*arguments):
        together.wait()  # breaks unless sixteen threads come here
        return really(*arguments)

    with open_fetcher(path, "pooled") as fetcher:
        monkeypatch.setattr(pread, "_preadv", preadv)
        plan = make_plan(fetcher, [(number * 10_000, 90) for number in range(16)])
        buffer = make_buffer(plan)
        fetcher.read(plan, buffer)
        check(path, plan, buffer)


def test_the_page_cache_begins_up_to_as_many_reads_as_there_are_workers(path, monkeypatch):
    begun, most = set(), 0
    really = pread._preadv

    def preadv(descriptor, target, offset, flags):
        nonlocal most
        if flags:
            begun.add(offset)
            most = max(most, len(begun))
            return -errno.EAGAIN
        assert offset in begun, "a read was waited for before it was begun"
        begun.remove(offset)
        return really(descriptor, target, offset, flags)

    with open_fetcher(path, "ahead", 12) as fetcher:
        monkeypatch.setattr(pread, "_preadv", preadv)
        plan = scattered(fetcher, 500, 1)
        buffer = make_buffer(plan)
        fetcher.read(plan, buffer)
        check(path, plan, buffer)
        assert most == 12
        assert not begun


def test_what_is_cached_is_read_with_one_call_each(path, monkeypatch):
    calls = []
    really = pread._preadv

    def preadv(*arguments):
        calls.append(arguments[2])
        return really(*arguments)

    with open_fetcher(path, "ahead") as fetcher:
        path.read_bytes()
        monkeypatch.setattr(pread, "_preadv", preadv)
        plan = scattered(fetcher, 500, 1)
        fetcher.read(plan, make_buffer(plan))
        assert calls == plan.offset.tolist()


def test_what_is_cached_in_part_is_waited_for(path, monkeypatch):
    really = pread._preadv

    def preadv(descriptor, target, offset, flags):
        return really(descriptor, target[:1] if flags else target, offset, 0)

    with open_fetcher(path, "ahead") as fetcher:
        monkeypatch.setattr(pread, "_preadv", preadv)
        plan = scattered(fetcher, 100)
        buffer = make_buffer(plan)
        assert fetcher.read(plan, buffer).resumed == 0
        check(path, plan, buffer)


def test_old_kernels_and_filesystems_that_cannot_say_get_the_pool(path, monkeypatch):
    options = FetcherOptions(direct_io="off")
    extents = [Extent(str(path), 0, 0, SIZE)]
    monkeypatch.setattr(pread, "kernel_release", lambda: "4.18.0-553.el8")
    with PreadFetcher(extents, 1, options) as fetcher:
        assert not fetcher._begins
    monkeypatch.setattr(pread, "kernel_release", lambda: "6.1.0")
    with PreadFetcher(extents, 1, options) as fetcher:
        assert fetcher._begins
    monkeypatch.setattr(pread, "_preadv", lambda *_: -errno.EOPNOTSUPP)
    with PreadFetcher(extents, 1, options) as fetcher:
        assert not fetcher._begins


def test_refused_native_aio_means_the_pool_and_a_reason(path, monkeypatch):
    def refuse(entries):
        raise Unsupported("native AIO is refused (ENOSYS): none here")

    open_fetcher(path, "queued").close()
    monkeypatch.setattr(pread, "Context", refuse)
    with PreadFetcher([Extent(str(path), 0, 0, SIZE)], 1, FetcherOptions(direct_io="on")) as fetcher:
        assert fetcher.direct_io
        assert fetcher.fell_back is None
        assert "ENOSYS" in fetcher.aio_refused
        plan = scattered(fetcher, 300)
        buffer = make_buffer(plan)
        fetcher.read(plan, buffer)
        check(path, plan, buffer)


@pytest.mark.parametrize("call", ["submit", "getevents"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_half_refused_native_aio_means_the_pool_and_a_reason(path, monkeypatch, call, code):
    open_fetcher(path, "queued").close()
    refused = dict(zip(("setup", "destroy", "submit", "getevents"), aio._calls(), strict=True))[call]
    really = aio._call
    monkeypatch.setattr(aio, "_call", lambda number, *rest: -code if number == refused else really(number, *rest))
    with PreadFetcher([Extent(str(path), 0, 0, SIZE)], 1, FetcherOptions(direct_io="on")) as fetcher:
        assert fetcher.direct_io
        assert f"native AIO is refused ({errno.errorcode[code]})" in fetcher.aio_refused
        plan = scattered(fetcher, 300)
        buffer = make_buffer(plan)
        fetcher.read(plan, buffer)
        check(path, plan, buffer)


def test_a_thread_that_gets_no_queue_uses_the_pool(path, monkeypatch):
    def refuse(entries):
        raise Unsupported("native AIO is refused (EAGAIN): no room")

    with open_fetcher(path, "queued") as fetcher, ThreadPoolExecutor(1) as other:
        monkeypatch.setattr(pread, "Context", refuse)
        plan = scattered(fetcher, 300)
        buffers = make_buffer(plan), make_buffer(plan)
        other.submit(fetcher.read, plan, buffers[0]).result()
        fetcher.read(plan, buffers[1])
        for buffer in buffers:
            check(path, plan, buffer)


# --- failures --------------------------------------------------------------------------------------------------------


def interfere(monkeypatch, change):
    """Have every result that a read has pass through `change(number of the read, result)`."""
    count = 0
    really_preadv, really_flow = pread._preadv, aio.Context.flow

    def preadv(descriptor, target, offset, flags):
        nonlocal count
        result = really_preadv(descriptor, target, offset, flags)
        if flags:
            return -errno.EAGAIN  # as if nothing were cached
        count += 1
        return change(count, result)

    def flow(self, requests, depth, stats):
        nonlocal count
        for numbers, results in really_flow(self, requests, depth, stats):
            start = count
            count += len(results)
            changed = [change(start + 1 + at, result) for at, result in enumerate(results.tolist())]
            yield numbers, np.array(changed)

    monkeypatch.setattr(pread, "_preadv", preadv)
    monkeypatch.setattr(aio.Context, "flow", flow)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_transient_errors_are_repeated(path, fetcher, monkeypatch, code):
    interfere(monkeypatch, lambda number, result: -code if number % 3 == 1 else result)
    plan = scattered(fetcher, 200)
    buffer = make_buffer(plan)
    stats = fetcher.read(plan, buffer)
    check(path, plan, buffer)
    assert stats.resumed > 0
    assert stats.reads == len(plan) + stats.resumed


def test_short_reads_are_read_on(path, fetcher, monkeypatch):
    interfere(monkeypatch, lambda number, result: result // 2 if number % 2 else result)
    plan = scattered(fetcher, 60, 3000)
    buffer = make_buffer(plan)
    stats = fetcher.read(plan, buffer)
    check(path, plan, buffer)
    assert stats.resumed > 0


def test_a_transient_error_that_stays_is_an_error(path, fetcher, monkeypatch):
    interfere(monkeypatch, lambda number, result: -errno.EAGAIN)
    plan = scattered(fetcher, 5)
    with pytest.raises(ReadError, match=str(path)) as raised:
        fetcher.read(plan, make_buffer(plan))
    assert raised.value.errno == errno.EAGAIN


def test_a_failed_read_is_an_error_and_nothing_is_in_flight_after_it(path, fetcher, monkeypatch):
    interfere(monkeypatch, lambda number, result: -errno.EIO if number == 300 else result)
    plan = make_plan(fetcher, [(at, 1) for at in range(0, SIZE, 600)])
    buffer = make_buffer(plan)
    with pytest.raises(ReadError) as raised:
        fetcher.read(plan, buffer)
    buffer[:] = 7
    assert (raised.value.path, raised.value.errno, raised.value.got) == (str(path), errno.EIO, None)
    assert raised.value.offset in plan.offset
    time.sleep(0.02)
    assert (buffer == 7).all()
    monkeypatch.undo()
    fetcher.read(plan, buffer)
    check(path, plan, buffer)


@pytest.mark.parametrize("way", ["ahead", "pooled"])
def test_an_error_of_a_device(way):
    """Reading this process' memory where none is mapped is a real EIO."""
    cls = PooledFetcher if way == "pooled" else PreadFetcher
    with cls([Extent("/proc/self/mem", 0, 0, 1000)], 1, FetcherOptions(direct_io="off")) as fetcher:
        fetcher._begins = way == "ahead"
        plan = make_plan(fetcher, [(offset, 16) for offset in range(0, 1000, 100)])
        with pytest.raises(ReadError, match=r"/proc/self/mem.*Input/output error") as raised:
            fetcher.read(plan, make_buffer(plan))
        assert raised.value.errno == errno.EIO
        assert raised.value.offset in plan.offset


@pytest.mark.parametrize("way", WAYS)
def test_a_truncated_file(path, tmp_path, way):
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    with open_fetcher(copy, way) as fetcher:
        plan = scattered(fetcher, 300)
        buffer = make_buffer(plan)
        os.truncate(copy, 600_001)
        with pytest.raises(ReadError, match=r"600001 now and had 1200007") as raised:
            fetcher.read(plan, buffer)
        error = raised.value
        assert error.path == str(copy)
        assert error.offset in plan.offset
        assert 0 <= error.got < error.wanted


def test_an_interrupt_leaves_nothing_in_flight(path, fetcher):
    plan = make_plan(fetcher, [(at, 1) for at in range(0, SIZE, 600)])
    buffer = make_buffer(plan)

    def interrupt(windows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetcher.read(plan, buffer, interrupt)
    buffer[:] = 7
    time.sleep(0.02)
    assert (buffer == 7).all()
    fetcher.read(plan, buffer)
    check(path, plan, buffer)


# --- threads and processes -------------------------------------------------------------------------------------------


def test_a_child_starts_afresh(path, fetcher):
    plan = scattered(fetcher, 400)
    buffer = make_buffer(plan)
    fetcher.read(plan, buffer)

    def read_and_close():
        buffer = make_buffer(plan)
        fetcher.read(plan, buffer)
        check(path, plan, buffer)
        fetcher.close()

    run_in_child(read_and_close)
    fetcher.read(plan, buffer)
    check(path, plan, buffer)


def test_an_interrupt_while_a_queue_is_given_back_is_raised(path, monkeypatch):
    fetcher = open_fetcher(path, "queued")
    fetcher.read(plan := scattered(fetcher, 16), make_buffer(plan))
    close = aio.Context.close

    def interrupted(context):
        monkeypatch.setattr(aio.Context, "close", close)
        context.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(aio.Context, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetcher.close()
