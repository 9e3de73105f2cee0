"""The suite lets a correct fetcher pass, and finds each fault that is planted in it."""

import contextlib
import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lazyio.errors import ReadError
from lazyio.fetchers import Alignment, Extent, Fetcher, FetcherOptions, Pending, ReadPlan, ReadStats
from lazyio.fetchers.base import Bytes, Int64, Landed
from lazyio.fetchers.conformance import FetcherConformance, run_in_child, write_rows
from lazyio.fetchers.resident import ResidentFetcher


class Correct(Fetcher):
    """What the faults are planted in: one read after the other."""

    name = "correct"

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        for window in range(len(plan)):
            self.read_one(plan, window, buffer)
            if landed is not None:
                landed(window + 1)
        return ReadStats(len(plan), int(plan.needed.sum()))

    def read_one(self, plan: ReadPlan, window: int, buffer: Bytes) -> None:
        offset, needed, dest = (int(value[window]) for value in (plan.offset, plan.needed, plan.dest))
        data = os.pread(self.files.descriptors[plan.file[window]], needed, offset)
        if len(data) < needed:
            self.came_short(self.files.paths[plan.file[window]], offset, needed, len(data), buffer)
        buffer[dest : dest + len(data)] = np.frombuffer(data, np.uint8)

    def came_short(self, path: str, offset: int, wanted: int, got: int, buffer: Bytes) -> None:
        raise ReadError("came short", path=path, offset=offset, wanted=wanted, got=got)


class TestCorrect(FetcherConformance):
    def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
        return Correct(extents, row_bytes, FetcherOptions())


class WritesBeyond(Correct):
    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        buffer[plan.buffer_bytes] ^= 0xFF
        return super().read(plan, buffer, landed)


class LeavesOneOut(Correct):
    def read_one(self, plan: ReadPlan, window: int, buffer: Bytes) -> None:
        if window != len(plan) - 1:
            super().read_one(plan, window, buffer)


class LosesTheLastByte(Correct):
    def read_one(self, plan: ReadPlan, window: int, buffer: Bytes) -> None:
        end = plan.dest[window] + plan.needed[window]
        last = buffer[end - 1]
        super().read_one(plan, window, buffer)
        buffer[end - 1] = last


class KnowsOneFile(Correct):
    def read_one(self, plan: ReadPlan, window: int, buffer: Bytes) -> None:
        plan.file[window] = 0
        super().read_one(plan, window, buffer)


class Has32BitOffsets(Correct):
    def read_one(self, plan: ReadPlan, window: int, buffer: Bytes) -> None:
        plan.offset[window] &= 0xFFFFFFFF
        super().read_one(plan, window, buffer)


class NeedsSomethingToRead(Correct):
    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        assert len(plan), "nothing to read"
        return super().read(plan, buffer, landed)


class LandsEarly(Correct):
    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        if landed is not None:
            landed(len(plan))
        return super().read(plan, buffer, None)


class LandsBackwards(Correct):
    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        stats = super().read(plan, buffer, None)
        if landed is not None:
            landed(2)
            landed(1)
        return stats


class LandsElsewhere(Correct):
    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().read, plan, buffer, landed).result()


class TakesShortReads(Correct):
    def came_short(self, path: str, offset: int, wanted: int, got: int, buffer: Bytes) -> None:
        pass


class LeavesAReadInFlight(Correct):
    def came_short(self, path: str, offset: int, wanted: int, got: int, buffer: Bytes) -> None:
        threading.Timer(0.01, buffer.fill, [0]).start()
        super().came_short(path, offset, wanted, got, buffer)


class DiesOfATruncatedFile(Correct):
    def came_short(self, path: str, offset: int, wanted: int, got: int, buffer: Bytes) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class SharesAWindow(Correct):
    def read_one(self, plan: ReadPlan, window: int, buffer: Bytes) -> None:
        self.window = window
        time.sleep(0.001)
        super().read_one(plan, self.window % len(plan), buffer)


class DoesNotSurviveAFork(Correct):
    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self.pool = ThreadPoolExecutor(1)

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        return self.pool.submit(super().read, plan, buffer).result()

    def close(self) -> None:
        self.pool.shutdown()
        super().close()


class BeginsInAPool(DoesNotSurviveAFork):
    def begin(self, plan: ReadPlan, buffer: Bytes) -> Pending:
        self.finish = self.pool.submit(Correct.read, self, plan, buffer).result
        return self

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        return Correct.read(self, plan, buffer, landed)


class HoldsALock(Correct):
    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self.lock = threading.Lock()

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        with self.lock:
            time.sleep(0.01)
            return super().read(plan, buffer, landed)


class LeavesADescriptor(Correct):
    def close(self) -> None:
        self.files.descriptors.pop()
        super().close()


class LeavesAThread(Correct):
    found = threading.Event()

    def close(self) -> None:
        threading.Thread(target=self.found.wait, daemon=True).start()
        super().close()


class LeavesAMap(Correct):
    def close(self) -> None:
        place, size, offset = ctypes.c_void_p(None), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_long(0)
        ctypes.CDLL(None).mmap(place, size, mmap.PROT_READ, mmap.MAP_SHARED, self.files.descriptors[0], offset)
        super().close()


class SaysItIsDirect(Correct):
    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self.direct_io = True


class KeepsDirectIOForItself(Correct):
    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self.also = self.files.reopen(0, os.O_RDONLY | os.O_DIRECT)

    def close(self) -> None:
        os.close(self.also)
        super().close()


class HasAnOddAlignment(Correct):
    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self.alignment = Alignment(1, 24)


class FallsBackWithoutAWord(Correct):
    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, options)
        self.fell_back = ""


class CountsNothing(Correct):
    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        super().read(plan, buffer, landed)
        return ReadStats()


class Later(Correct):
    """Reads what was begun in a thread, a little later."""

    def begin(self, plan: ReadPlan, buffer: Bytes) -> Pending:
        self.plan = plan
        self.timer = threading.Timer(0.01, self.read_late, [plan, buffer])
        self.timer.start()
        return self

    def read_late(self, plan: ReadPlan, buffer: Bytes) -> None:
        with contextlib.suppress(Exception):  # once it is closed
            self.read(plan, buffer)

    def finish(self) -> ReadStats:
        self.timer.join()
        return ReadStats(len(self.plan), int(self.plan.needed.sum()))


class FinishesEarly(Later):
    def finish(self) -> ReadStats:
        return ReadStats(len(self.plan), int(self.plan.needed.sum()))


class ReadsOnAfterItsEnd(Later):
    def read_one(self, plan: ReadPlan, window: int, buffer: Bytes) -> None:
        buffer[int(plan.dest[window])] ^= 0xFF


class ExpectsInVain(ResidentFetcher):
    def expect(self, ids: Int64) -> ReadStats:
        self._table[ids] = 0
        return super().expect(ids)


class SortsRows(ResidentFetcher):
    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        return super().take(np.sort(ids), out)


FAULTS: list[tuple[type[Fetcher], str, tuple[str, ...]]] = [
    (WritesBeyond, "test_random_rows", ("one extent",)),
    (LeavesOneOut, "test_all_rows", ("several extents and files",)),
    (LosesTheLastByte, "test_first_and_last_row_of_each_extent", ("rows longer than an OS page",)),
    (KnowsOneFile, "test_random_rows", ("several extents and files",)),
    (Has32BitOffsets, "test_random_rows", ("beyond 4 GiB",)),
    (NeedsSomethingToRead, "test_an_empty_plan_reads_nothing", ()),
    (LandsEarly, "test_landed_is_truthful_and_only_grows", ()),
    (LandsBackwards, "test_landed_is_truthful_and_only_grows", ()),
    (LandsElsewhere, "test_landed_is_truthful_and_only_grows", ()),
    (TakesShortReads, "test_a_truncated_file_is_an_error_or_the_old_bytes", ()),
    (LeavesAReadInFlight, "test_a_truncated_file_is_an_error_or_the_old_bytes", ()),
    (DiesOfATruncatedFile, "test_a_truncated_file_is_an_error_or_the_old_bytes", ()),
    (SharesAWindow, "test_threads_read_at_once", ()),
    (DoesNotSurviveAFork, "test_a_child_reads_after_its_parent_has", ()),
    (HoldsALock, "test_a_child_reads_while_another_thread_of_its_parent_does", ()),
    (LeavesADescriptor, "test_closing_frees_everything", ()),
    (LeavesAThread, "test_closing_frees_everything", ()),
    (LeavesAMap, "test_closing_frees_everything", ()),
    (SaysItIsDirect, "test_attributes", ()),
    (KeepsDirectIOForItself, "test_attributes", ()),
    (HasAnOddAlignment, "test_attributes", ()),
    (FallsBackWithoutAWord, "test_attributes", ()),
    (CountsNothing, "test_counts", ()),
    (FinishesEarly, "test_begun_reads_bring_the_same", ("one extent",)),
    (Later, "test_other_reads_come_between", ()),
    (ReadsOnAfterItsEnd, "test_begun_reads_may_be_forgotten", ()),
    (BeginsInAPool, "test_a_child_comes_between", ()),
    (ExpectsInVain, "test_expected_rows_are_taken", ()),
    (SortsRows, "test_rows_are_taken_in_any_order", ()),
]


@pytest.mark.parametrize(
    ("fetcher", "test", "arguments"), FAULTS, ids=[f"{fault.__name__}-{test}" for fault, test, _ in FAULTS]
)
def test_a_fault_is_found(fetcher: type[Fetcher], test: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    class Suite(FetcherConformance):
        child_limit_s = 0.5

        def make(self, extents: Sequence[Extent], row_bytes: int) -> Fetcher:
            return fetcher(extents, row_bytes, FetcherOptions())

    LeavesAThread.found.clear()
    try:
        with pytest.raises(AssertionError):
            getattr(Suite(), test)(*arguments, tmp_path)
    finally:
        LeavesAThread.found.set()


def test_a_child_that_hangs_fails_or_is_killed_is_told_apart() -> None:
    def fail() -> None:
        raise ValueError("a reason")

    def hang() -> None:
        time.sleep(10)

    run_in_child(lambda: None)
    with pytest.raises(AssertionError, match="a reason"):
        run_in_child(fail)
    with pytest.raises(AssertionError, match=r"(?s)hung for 0\.1 s:.*in hang"):
        run_in_child(hang, limit_s=0.1)
    with pytest.raises(AssertionError, match="killed by SIGKILL"):
        run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_written_rows_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    made = write_rows(tmp_path, 7, [("a", 3, 5), ("b", 0, 2), ("a", 50, 1)])
    assert [(extent.offset, extent.first_row, extent.rows) for extent in made.extents] == [
        (3, 0, 5),
        (0, 5, 2),
        (50, 7, 1),
    ]
    data = (tmp_path / "a").read_bytes()
    assert data == bytes(3) + made.content[:5].tobytes() + bytes(12) + made.content[7:].tobytes()
    assert (tmp_path / "b").read_bytes() == made.content[5:7].tobytes()
