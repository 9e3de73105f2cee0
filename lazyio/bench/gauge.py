"""Counters of the process and of the disk under a table, read before and after what is measured."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lazyio import host


@dataclass(frozen=True, slots=True)
class Counters:
    """What has been counted so far; the difference of two is what happened between them. None: not counted here."""

    user_s: float = 0.0
    system_s: float = 0.0
    major_faults: int = 0
    syscr: int | None = 0
    device_read_bytes: int | None = 0  # that this process made devices read
    disk_reads: int | None = 0  # of the whole disk, other processes included
    disk_read_s: float | None = 0.0  # sum over those reads of the time each one took
    thread_s: float = 0.0  # CPU time of the thread that reads the counters

    def __sub__(self, earlier: Counters) -> Counters:
        return self._each(earlier, lambda now, then: now - then)

    def __add__(self, other: Counters) -> Counters:
        return self._each(other, lambda one, another: one + another)

    def per_cpu_s(self, count: int) -> float | None:
        """`count` over the CPU seconds of all threads, user and system; None if none were seen."""
        spent = self.user_s + self.system_s
        return count / spent if spent > 0 else None

    def _each(self, other: Counters, combine: Callable[[Any, Any], Any]) -> Counters:
        pairs = [(getattr(self, name), getattr(other, name)) for name in self.__slots__]
        values: list[Any] = [None if None in pair else combine(*pair) for pair in pairs]
        return Counters(*values)


class Gauge:
    """Counts what happens between `start` and `stop`, over as many stretches as are wanted."""

    def __init__(self, path: str) -> None:
        # A table over several disks is watched on that of its first file.
        device = host.filesystem_of(path).device
        self._disk = None if device is None else Path("/sys/block", device, "stat")
        self.total = Counters()
        self._own_calls = 0
        self.start()
        self.stop()
        # Reading the counters takes read calls too, as many each time.
        self._own_calls = self.total.syscr or 0
        self.total = Counters()

    def start(self) -> None:
        """Begin a stretch."""
        self._before = replace(self._read(), thread_s=time.thread_time())

    def stop(self) -> None:
        """End it, and add what happened to `total`."""
        thread_s = time.thread_time()  # first, since reading the others takes time
        spent = replace(self._read(), thread_s=thread_s) - self._before
        if spent.syscr is not None:
            spent = replace(spent, syscr=spent.syscr - self._own_calls)
        self.total += spent

    def _read(self) -> Counters:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counted = host.io_counters()
        return Counters(
            usage.ru_utime,
            usage.ru_stime,
            usage.ru_majflt,
            None if counted is None else counted.syscr,
            None if counted is None else counted.read_bytes,
            *self._disk_counters(),
        )

    def _disk_counters(self) -> tuple[int | None, float | None]:
        # Reads completed, reads merged, sectors, milliseconds that the reads took in all: Documentation/block/stat.rst
        try:
            fields = self._disk.read_text().split() if self._disk else []
            return int(fields[0]), int(fields[3]) / 1000
        except (OSError, IndexError):
            return None, None
