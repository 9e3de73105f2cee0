import errno
import mmap
import os
import platform
import threading
from pathlib import Path

import numpy as np
import pytest

from lazyio.errors import Unsupported
from lazyio.fetchers import aio
from lazyio.fetchers.aio import Context, Requests
from lazyio.fetchers.base import ReadStats
from lazyio.fetchers.conformance import run_in_child

BLOCK = 4096
BLOCKS = 1500


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("aio") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(BLOCKS * BLOCK))
    return path


@pytest.fixture(params=[os.O_DIRECT, 0], ids=["direct", "buffered"])
def descriptor(content: Path, request):
    try:
        descriptor = os.open(content, os.O_RDONLY | request.param)
    except OSError as error:
        pytest.skip(f"no direct I/O here: {error}")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def context():
    try:
        context = Context(32)
    except Unsupported as refused:
        pytest.skip(str(refused))
    yield context
    context.close()


class Area:
    """Blocks of memory for reads of `blocks`, aligned to OS pages."""

    def __init__(self, descriptor: int, blocks: np.ndarray) -> None:
        self.blocks = blocks
        self.memory = np.frombuffer(mmap.mmap(-1, max(1, len(blocks)) * BLOCK), np.uint8)
        numbers = np.arange(len(blocks))
        length = np.full(len(blocks), BLOCK)
        address = self.memory.ctypes.data + numbers * BLOCK
        self.requests = Requests(numbers, np.full(len(blocks), descriptor, np.int32), blocks * BLOCK, length, address)

    def check(self, content: Path) -> None:
        whole = np.fromfile(content, np.uint8).reshape(-1, BLOCK)
        np.testing.assert_array_equal(self.memory[: len(self.blocks) * BLOCK].reshape(-1, BLOCK), whole[self.blocks])


def some_blocks(count: int) -> np.ndarray:
    return np.random.default_rng(count).permutation(BLOCKS)[:count]


def carry_out(context: Context, requests: Requests, depth: int) -> tuple[list[int], list[int]]:
    numbers, results = [], []
    for some_numbers, some_results in context.flow(requests, depth, ReadStats()):
        numbers += some_numbers.tolist()
        results += some_results.tolist()
    return numbers, results


@pytest.mark.parametrize("depth", [1, 2, 7, 32])
@pytest.mark.parametrize("count", [1, 16, 1300])
def test_every_read_is_carried_out_once(context, content, descriptor, count, depth):
    area = Area(descriptor, some_blocks(count))
    numbers, results = carry_out(context, area.requests, depth)
    assert sorted(numbers) == list(range(count))
    assert set(results) == {BLOCK}
    area.check(content)
    assert context.usable


def test_no_reads_are_no_arrivals(context, descriptor):
    assert carry_out(context, Area(descriptor, some_blocks(0)).requests, 8) == ([], [])


def test_no_more_than_depth_are_in_flight_and_a_few_go_out_before_any_is_waited_for(context, descriptor, monkeypatch):
    in_flight, counts = 0, []  # in flight after each call
    really = aio._call

    def call(number, *arguments):
        nonlocal in_flight
        result = really(number, *arguments)
        in_flight += result if number == context._submit else -max(0, result)
        counts.append(in_flight)
        return result

    monkeypatch.setattr(aio, "_call", call)
    carry_out(context, Area(descriptor, some_blocks(16)).requests, 20)
    assert counts[:8] == [2, 4, 6, 8, 10, 12, 14, 16]
    carry_out(context, Area(descriptor, some_blocks(700)).requests, 20)
    assert max(counts) == 20
    assert in_flight == 0


def test_a_read_that_cannot_be_started_is_a_result(context, content, descriptor):
    area = Area(descriptor, some_blocks(900))
    wrong = [0, 1, 500, 899]
    area.requests._iocbs["fd"][wrong] = 1 << 20
    numbers, results = carry_out(context, area.requests, 16)
    assert sorted(numbers) == list(range(900))
    by_number = dict(zip(numbers, results, strict=True))
    assert {number for number, result in by_number.items() if result != BLOCK} == set(wrong)
    assert {by_number[number] for number in wrong} == {-errno.EBADF}
    assert context.usable


def test_results_are_short_at_the_end_of_the_file_and_negative_for_errors(context, descriptor):
    area = Area(descriptor, np.array([BLOCKS - 1, BLOCKS, 3]))
    area.requests._iocbs["offset"][2] = -BLOCK
    numbers, results = carry_out(context, area.requests, 4)
    assert dict(zip(numbers, results, strict=True)) == {0: BLOCK, 1: 0, 2: -errno.EINVAL}


def test_giving_up_waits_for_what_is_in_flight(context, descriptor):
    area = Area(descriptor, some_blocks(1400))
    arrivals = context.flow(area.requests, 32, ReadStats())
    next(arrivals)
    arrivals.close()
    area.memory[:] = 7
    assert not context.usable
    threading.Event().wait(0.02)
    assert (area.memory == 7).all()


def test_an_interrupt_waits_for_what_is_in_flight(context, descriptor, monkeypatch):
    area = Area(descriptor, some_blocks(100))
    really = aio._call

    def call(number, *arguments):
        result = really(number, *arguments)
        if number == context._submit:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(aio, "_call", call)
        with pytest.raises(KeyboardInterrupt):
            carry_out(context, area.requests, 32)
    area.memory[:] = 7
    assert not context.usable
    threading.Event().wait(0.02)
    assert (area.memory == 7).all()


def test_service_time_counts_reads_in_flight(context, descriptor, monkeypatch):
    clock = iter(np.arange(1000.0))
    monkeypatch.setattr(aio.time, "perf_counter", lambda: next(clock))
    stats = ReadStats()
    list(context.flow(Area(descriptor, some_blocks(8)).requests, 8, stats))
    assert stats.service_s >= 8  # all eight were in flight for one tick at least


def test_reads_go_on_by_themselves_past_the_page_cache_alone(context, content):
    buffered = os.open(content, os.O_RDONLY)
    area = Area(buffered, some_blocks(1))
    assert not context.goes_on_by_itself(area.requests)
    area.check(content)
    os.close(buffered)
    area.requests._iocbs["fd"] = 1 << 20
    assert not context.goes_on_by_itself(area.requests)


def test_a_child_has_to_make_its_own(context, content, descriptor):
    def check():
        assert not context.usable
        area = Area(descriptor, some_blocks(40))
        carry_out(Context(8), area.requests, 8)
        area.check(content)
        context.close()

    run_in_child(check)
    assert context.usable
    area = Area(descriptor, some_blocks(40))
    carry_out(context, area.requests, 8)
    area.check(content)


def test_closing_twice_is_harmless(context):
    context.close()
    assert not context.usable
    context.close()


def test_a_refusal_says_what_to_change(context):
    with pytest.raises(Unsupported, match=r"EAGAIN.*fs\.aio-max-nr"):
        Context(2 * int(Path("/proc/sys/fs/aio-max-nr").read_text()))


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EPERM, "EPERM.*seccomp.*io_setup"), (errno.ENOSYS, "ENOSYS.*kernel"), (errno.ENOMEM, "ENOMEM.*memory")],
)
def test_refusals_are_named(monkeypatch, code, words):
    monkeypatch.setattr(aio, "_call", lambda number, *arguments: -code)
    with pytest.raises(Unsupported, match=words):
        Context(8)


def test_one_that_an_interrupt_left_half_made_goes_in_silence():
    Context.__new__(Context).close()


def test_an_unknown_machine_is_unsupported(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    aio._calls.cache_clear()
    with pytest.raises(Unsupported, match="vax"):
        Context(8)
    monkeypatch.undo()
    aio._calls.cache_clear()


def test_an_interrupt_while_a_queue_is_given_back_is_raised(context, monkeypatch):
    call, calls = aio._call, []

    def interrupted(*arguments):
        calls.append(arguments)
        call(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(aio, "_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        context.close()
    context.close()
    assert len(calls) == 1
