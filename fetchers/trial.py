"""What tests of fetchers are made on: tables whose rows are known, buffers with guards, children that may hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lazyio.fetchers.base import Alignment, Bytes, Extent, Fetcher, Int64
from lazyio.ple.plan import Geometry, RowPlan

_GUARD_BYTES = 8192


@dataclass(frozen=True, slots=True)
class MadeTable:
    """A table whose rows are known."""

    extents: tuple[Extent, ...]
    content: Bytes  # [rows, row_bytes]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.content.shape[1])

    def plan(self, fetcher: Fetcher, ids: Int64) -> RowPlan:
        """Plan the reads of rows `ids`, ascending and distinct, for a fetcher that was made for this table."""
        return Geometry(self.extents, self.row_bytes, fetcher.files.index).plan(ids, fetcher.alignment)


def write_rows(folder: Path, row_bytes: int, places: Sequence[tuple[str, int, int]]) -> MadeTable:
    """Write random rows to files of `folder`; each place is a file's name, an offset in bytes and a number of rows."""
    content = np.random.default_rng(row_bytes).integers(0, 256, (sum(rows for *_, rows in places), row_bytes), np.uint8)
    extents: list[Extent] = []
    first = 0
    for name, offset, rows in places:
        path = str(folder / name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, content[first : first + rows].tobytes(), offset)
        os.close(descriptor)
        extents.append(Extent(path, offset, first, rows))
        first += rows
    return MadeTable(tuple(extents), content)


def run_in_child(check: Callable[[], object], *, limit_s: float = 30) -> None:
    """Run `check` in a forked child. Raises AssertionError, with its traceback, if it fails, hangs or is killed."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, forking a process with threads warns. What comes of that is what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _be_the_child(check, writing, limit_s)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != -signal.SIGALRM, f"the child hung for {limit_s} s:\n{told}"
    assert code >= 0, f"the child was killed by {signal.Signals(-code).name}"
    assert code == 0, f"the child failed:\n{told}"


def _be_the_child(check: Callable[[], object], writing: int, limit_s: float) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=writing, chain=True)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        check()
        code = 0
    except BaseException:
        os.write(writing, traceback.format_exc().encode())
    finally:
        os._exit(code)


class Guarded:
    """A buffer that is aligned as asked and no better, full of one byte, with guards before and behind."""

    def __init__(self, size: int, alignment: Alignment, poison: int) -> None:
        self._poison = poison
        step = alignment.memory
        self._whole = np.full(size + 2 * _GUARD_BYTES + 4 * step, poison, np.uint8)
        address = self._whole.ctypes.data + _GUARD_BYTES
        self._start = _GUARD_BYTES + (-address % (2 * step)) + step
        self._stop = self._start + size

    @property
    def lent(self) -> Bytes:
        """What the fetcher is given: more than it may write to."""
        return self._whole[self._start : self._stop + _GUARD_BYTES]

    def check(self) -> None:
        """Raise AssertionError where something was written outside of the plan's buffer."""
        outside = np.concatenate([self._whole[: self._start], self._whole[self._stop :]])
        assert (outside == self._poison).all(), "bytes outside of the plan's buffer were written"
