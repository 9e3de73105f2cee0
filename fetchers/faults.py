"""Faults on purpose: what a kernel or a device may answer, at any rate you like, over any fetcher.

`with_faults(fetcher, Faults(short=0.01, eio=0.001))` behaves as `fetcher` would on a worse machine: reads come short,
are interrupted, are refused, fail, come late or in another order. Whatever a window is denied never reaches the buffer,
so that nothing above succeeds by luck. `lazyio.fetchers.faulty_kernel` plants the same faults below our own fetchers.
"""

from __future__ import annotations

import errno
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import SettingError
from lazyio.fetchers.base import Alignment, Bytes, Fetcher, Int64, Landed, ReadPlan, ReadStats, RowFetcher
from lazyio.fetchers.progress import Progress
from lazyio.fetchers.wrapping import take_after
from lazyio.staging import Staging

_UNBOUNDED = 1 << 60
_RATES = ("short", "eintr", "eagain", "eio", "late", "reorder")


@dataclass(frozen=True, slots=True)
class Faults:
    """How often each fault strikes: rates are probabilities a window and attempt, from 0 to 1.

    Raises SettingError for a rate that is none, for rates of failures that add up to more than 1, and for a delay
    or a seed below 0.
    """

    short: float = 0.0  # fewer bytes than asked, perhaps none
    eintr: float = 0.0  # interrupted before anything was read
    eagain: float = 0.0  # refused for want of something, for the moment
    eio: float = 0.0  # failed for good: the gather ends with ReadError
    late: float = 0.0  # arrives after the others, and `delay_s` later than it could
    reorder: float = 0.0  # arrives after windows that lie behind it
    delay_s: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _RATES:
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"the rate of {name} is {getattr(self, name)}; it can be from 0 to 1")
        if self.short + self.eintr + self.eagain + self.eio > 1:
            raise SettingError("the rates of short, eintr, eagain and eio add up to more than 1: lower them")
        if not 0 <= self.delay_s < math.inf:
            raise SettingError(f"delay_s is {self.delay_s}; it must be 0 or more seconds")
        if self.seed < 0:
            raise SettingError(f"seed is {self.seed}; it must be 0 or more")

    @classmethod
    def everywhere(cls, rate: float, *, eio: float = 0.0, delay_s: float = 0.001, seed: int = 0) -> Faults:
        """All faults at one rate, but for EIO, which nothing below a caller can make good."""
        return cls(rate, rate, rate, eio, rate, rate, delay_s, seed)


class Dice:
    """Draws faults. Every read has a stream of its own, by number, so that threads need no lock and a seed is enough to
    see a run again.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._reads = itertools.count()

    def for_a_read(self) -> np.random.Generator:
        """Randomness for the next read."""
        return np.random.default_rng([self.faults.seed, next(self._reads)])

    def results(self, random: np.random.Generator, needed: Int64) -> tuple[Int64, NDArray[np.bool_]]:
        """What the kernel answers to reads that need so many bytes [n], and which reads it lets through.

        Where one is not let through, the answer is a negated errno, or fewer bytes than needed.
        """
        faults = self.faults
        bounds = np.cumsum([faults.short, faults.eintr, faults.eagain, faults.eio])
        kind = np.searchsorted(bounds, random.random(len(needed)), side="right")
        answers = np.array([0, -errno.EINTR, -errno.EAGAIN, -errno.EIO, 0])[kind]
        short = kind == 0
        answers[short] = (random.random(np.count_nonzero(short)) * needed[short]).astype(np.int64)
        return answers, kind == len(bounds)

    def turns(self, random: np.random.Generator, count: int) -> list[tuple[NDArray[np.intp], float]]:
        """Which of so many reads are answered at once, which after those, and which late; with seconds to wait first.

        Each turn ascends; empty ones are left out.
        """
        faults = self.faults
        turn = np.where(random.random(count) < faults.reorder, 1, 0)
        turn[random.random(count) < faults.late] = 2
        delays = (0.0, 0.0, faults.delay_s)
        turns = [(np.flatnonzero(turn == number), delay) for number, delay in enumerate(delays)]
        return [(which, delay) for which, delay in turns if len(which)]


def with_faults(fetcher: Fetcher, faults: Faults) -> Fetcher:
    """Put faults between a fetcher and its user. The result owns the fetcher, and is of its kind."""
    return FaultyRowFetcher(fetcher, faults) if isinstance(fetcher, RowFetcher) else FaultyFetcher(fetcher, faults)


class FaultyFetcher(Fetcher):
    """Any fetcher, as a device on which reads go wrong; what is transient is made good here, as the contract asks."""

    name: ClassVar[str] = "faults"

    def __init__(self, inner: Fetcher, faults: Faults) -> None:
        take_after(self, inner)
        self._inner = inner
        self._device = _Device(self, self.alignment.offset, inner.read, faults)

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        """Read the plan; the base class has the contract."""
        return self._device.read(plan, buffer, landed)

    def close(self) -> None:
        """Close the fetcher below."""
        self._device.close()
        self._inner.close()


class FaultyRowFetcher(RowFetcher):
    """A fetcher whose rows lie in addressable memory, as if each of them were read from a device that is bad."""

    name: ClassVar[str] = "faults"

    def __init__(self, inner: RowFetcher, faults: Faults) -> None:
        take_after(self, inner)
        self._inner = inner
        self._device = _Device(self, self.row_bytes, self._take_windows, faults)
        self._first = np.array([extent.first_row for extent in self.extents], np.int64)
        self._offset = np.array([extent.offset for extent in self.extents], np.int64)
        self._file = np.array([self.files.index[extent.path] for extent in self.extents], np.int32)

    def take(self, ids: Int64, out: Bytes) -> ReadStats:
        """Copy rows; the base class has the contract."""
        extent = np.searchsorted(self._first, ids, side="right") - 1
        offset = self._offset[extent] + (ids - self._first[extent]) * self.row_bytes
        length = np.full(len(ids), self.row_bytes)
        dest = np.arange(len(ids)) * self.row_bytes
        plan = ReadPlan(self._file[extent], offset, length, length, dest, out.size)
        return self._device.read(plan, out.reshape(-1))

    def close(self) -> None:
        """Close the fetcher below."""
        self._device.close()
        self._inner.close()

    def _take_windows(self, plan: ReadPlan, buffer: Bytes) -> ReadStats:
        """Have the fetcher below copy windows of a row each."""
        return self._inner.take(self._row_at(plan.file, plan.offset), buffer.reshape(len(plan), self.row_bytes))


class _Device:
    """Answers reads as a bad device does. What it lets through is read by `carry_out(plan, buffer)`.

    It never reads less of a window than `block` bytes, or a multiple of that.
    """

    def __init__(
        self, fetcher: Fetcher, block: int, carry_out: Callable[[ReadPlan, Bytes], ReadStats], faults: Faults
    ) -> None:
        self._files = fetcher.files
        self._block = block
        self._carry_out = carry_out
        self._dice = Dice(faults)
        self._areas = Staging(_UNBOUNDED)

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        """Read a plan, going on with what came short and repeating what was refused."""
        stats = ReadStats()
        progress = Progress(plan, self._files, Alignment(self._block))
        random = self._dice.for_a_read()
        windows = np.arange(len(plan))
        while len(windows) and progress.failure is None:
            again = []
            for which, delay_s in self._dice.turns(random, len(windows)):
                time.sleep(delay_s)
                stats.service_s += delay_s * len(which)
                turn = windows[which]
                again.append(progress.settle(turn, self._answer(random, plan, progress, turn, buffer, stats)))
                if progress.failure is not None:
                    break
                if landed is not None:
                    landed(progress.landed())
            windows = np.sort(np.concatenate(again))
        if progress.failure is not None:
            raise progress.failure
        stats.resumed += progress.resumed
        return stats

    def close(self) -> None:
        """Free the memory that windows pass through."""
        self._areas.close()

    def _answer(
        self,
        random: np.random.Generator,
        plan: ReadPlan,
        progress: Progress,
        windows: Int64,
        buffer: Bytes,
        stats: ReadStats,
    ) -> Int64:
        """Bring what the dice allow of these windows to the buffer; return their results."""
        offset, length, dest = progress.rest(windows)
        needed = plan.needed[windows] - (offset - plan.offset[windows])
        results, through = self._dice.results(random, needed)
        results[through] = needed[through]
        arrives = allowed(results, through, length, self._block)
        some = np.flatnonzero(arrives)
        if len(some):
            length = arrives[some]
            ends = length.cumsum()
            needed = np.minimum(length, needed[some])
            part = ReadPlan(plan.file[windows[some]], offset[some], length, needed, ends - length, int(ends[-1]))
            # A plan has no gaps in its buffer, and this one would: so it is read elsewhere and copied.
            with self._areas.lease(part.buffer_bytes) as area:
                stats.add(self._carry_out(part, area))
                _copy(area, part, buffer, dest[some])
        return results


def allowed(results: Int64, through: NDArray[np.bool_], length: Int64, block: int) -> Int64:
    """Bytes [n] that may really be read by reads of `length`, given the results they are to have."""
    return np.where(through, length, np.maximum(results, 0) // block * block)


def _copy(area: Bytes, part: ReadPlan, buffer: Bytes, dest: Int64) -> None:
    """Copy windows to their places; neighbours that stay neighbours go together."""
    shift = dest - part.dest
    heads = np.append(0, np.flatnonzero(np.diff(shift)) + 1)
    starts = part.dest[heads].tolist()
    for start, stop, by in zip(starts, [*starts[1:], part.buffer_bytes], shift[heads].tolist(), strict=True):
        buffer[start + by : stop + by] = area[start:stop]
