"""Results that no disk gives on demand, fabricated."""

import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.fetchers.base import Alignment, ReadPlan
from lazyio.fetchers.files import FileSet
from lazyio.fetchers.progress import MAX_ATTEMPTS, Progress

CONTENT = np.random.default_rng(5).integers(0, 256, 20_000, np.uint8).tobytes()
TRANSIENT = [-errno.EINTR, -errno.EAGAIN, -errno.EBUSY]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileSet]:
    path = tmp_path_factory.mktemp("progress") / "rows"
    path.write_bytes(CONTENT)
    files = FileSet([str(path)])
    yield files
    files.close()


def plan_of(*windows: tuple[int, int, int]) -> ReadPlan:
    """Windows as (offset, length, needed)."""
    offset, length, needed = np.array(windows, np.int64).reshape(-1, 3).T
    dest = np.cumsum(length) - length
    return ReadPlan(np.zeros(len(offset), np.int32), offset, length, needed, dest, int(length.sum()))


def progress_of(files: FileSet, *windows: tuple[int, int, int], block: int = 1) -> Progress:
    return Progress(plan_of(*windows), files, Alignment(block, block))


def settle(progress: Progress, *pairs: tuple[int, int]) -> list[int]:
    """Report (window, result) pairs; the windows to be read on."""
    return progress.settle(np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])).tolist()


def rest(progress: Progress, window: int) -> tuple[int, int, int]:
    offset, length, dest = progress.rest(np.array([window]))
    return int(offset[0]), int(length[0]), int(dest[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_a_device_does_the_bytes_come(files: FileSet, data: st.DataObject) -> None:
    """A device that answers in any order, gives less than asked or nothing for now, ends with every byte in place."""
    block = data.draw(st.sampled_from([1, 512]))
    ends = sorted(data.draw(st.sets(st.integers(0, -(-len(CONTENT) // block)), min_size=2, max_size=12)))
    windows = [
        (start * block, (stop - start) * block, min(stop * block, len(CONTENT)) - start * block)
        for start, stop in pairwise(ends)
    ]
    progress = progress_of(files, *windows, block=block)
    buffer = np.zeros(progress.plan.buffer_bytes, np.uint8)
    waiting = list(range(len(windows)))
    landed = before = 0
    while waiting:
        batch = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        results = []
        for window in batch:
            offset, length, dest = rest(progress, window)
            assert offset % block == dest % block == 0
            there = CONTENT[offset : offset + length]
            # Misbehaves for a while, so that the attempts that a window has are not used up.
            kind = data.draw(st.sampled_from(["all", "short", "later"])) if before < 20 else "all"
            before += 1
            if kind == "later":
                results.append(data.draw(st.sampled_from(TRANSIENT)))
                continue
            got = len(there) if kind == "all" else data.draw(st.integers(0, len(there)))
            buffer[dest : dest + got] = np.frombuffer(there[:got], np.uint8)
            results.append(got)
        again = settle(progress, *zip(batch, results, strict=True))
        waiting = [window for window in waiting if window not in batch] + again
        now = progress.landed()
        assert landed <= now
        assert now == min(waiting, default=len(windows))
        landed = now
    assert progress.failure is None
    for (offset, _, needed), dest in zip(windows, progress.plan.dest.tolist(), strict=True):
        assert buffer[dest : dest + needed].tobytes() == CONTENT[offset : offset + needed]


def test_a_short_read_goes_on_at_the_last_whole_block(files: FileSet) -> None:
    progress = progress_of(files, (0, 512, 90), (1024, 4096, 4000), block=512)
    assert settle(progress, (0, 512), (1, 1500)) == [1]
    assert rest(progress, 1) == (2048, 3072, 1536)
    assert settle(progress, (1, 2976)) == []
    assert (progress.resumed, progress.bytes_read, progress.landed()) == (1, 512 + 1500 + 2976, 2)


def test_enough_is_what_is_needed_not_what_was_asked(files: FileSet) -> None:
    progress = progress_of(files, (19_968, 512, 32), block=512)
    assert settle(progress, (0, 32)) == []
    assert progress.landed() == 1
    assert progress.failure is None


@pytest.mark.parametrize("result", TRANSIENT)
def test_what_is_transient_is_repeated_for_a_while(files: FileSet, result: int) -> None:
    progress = progress_of(files, (100, 90, 90))
    for _ in range(MAX_ATTEMPTS):
        assert settle(progress, (0, result)) == [0]
        assert rest(progress, 0) == (100, 90, 0)
    assert settle(progress, (0, result)) == []
    assert progress.resumed == MAX_ATTEMPTS
    assert progress.failure is not None
    assert progress.failure.errno == -result
    assert f"attempt {MAX_ATTEMPTS + 1}" in str(progress.failure)


def test_an_error_of_the_device_is_told_with_its_place(files: FileSet) -> None:
    progress = progress_of(files, (0, 90, 90), (1800, 90, 90))
    assert settle(progress, (1, -errno.EIO), (0, 90)) == []
    failure = progress.failure
    assert failure is not None
    assert (failure.path, failure.offset, failure.wanted, failure.got) == (files.paths[0], 1800, 90, None)
    assert failure.errno == errno.EIO
    assert "90 bytes of" in str(failure)
    assert "at offset 1800 failed: Input/output error" in str(failure)


def test_the_first_failure_is_kept_and_nothing_goes_on_after_it(files: FileSet) -> None:
    progress = progress_of(files, (0, 90, 90), (90, 90, 90), (180, 90, 90))
    settle(progress, (2, -errno.EIO))
    assert settle(progress, (1, -errno.ENXIO), (0, -errno.EINTR)) == []
    assert progress.failure is not None
    assert progress.failure.errno == errno.EIO


def test_an_end_of_file_that_came_nearer_is_told_with_all_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(CONTENT)
    files = FileSet([str(path)])
    progress = progress_of(files, (512, 4096, 4000), block=512)
    os.truncate(path, 2000)
    assert settle(progress, (0, 1488)) == []
    failure = progress.failure
    assert failure is not None
    assert (failure.offset, failure.wanted, failure.got, failure.errno) == (512, 4000, 1488, None)
    assert "wanted 4000 bytes and got 1488; the file ends at 2000 now and had 20000 bytes" in str(failure)
    files.close()


def test_a_device_that_gives_nothing_is_not_asked_for_ever(files: FileSet) -> None:
    progress = progress_of(files, (0, 90, 90))
    for _ in range(MAX_ATTEMPTS):
        assert settle(progress, (0, 0)) == [0]
    assert settle(progress, (0, 0)) == []
    assert f"gave no more in {MAX_ATTEMPTS + 1} attempts" in str(progress.failure)


def test_landed_counts_from_the_first_window_without_a_gap(files: FileSet) -> None:
    progress = progress_of(files, *((number * 90, 90, 90) for number in range(4)))
    assert progress.landed() == 0
    settle(progress, (1, 90), (3, 90))
    assert progress.landed() == 0
    settle(progress, (0, 90))
    assert progress.landed() == 2
    settle(progress, (2, 90))
    assert progress.landed() == 4
    assert progress.landed() == 4
