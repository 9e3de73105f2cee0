from __future__ import annotations

import os
from pathlib import Path

import pytest

from lazyio import host
from lazyio.bench.gauge import Counters, Gauge
from lazyio.bench.residency import drop_pages, page_ranges
from lazyio.ple.spec import TableSpec


def test_counts_stretches_and_not_what_lies_between(table: TableSpec) -> None:
    if host.io_counters() is None:
        pytest.skip("this kernel does not count reads")
    gauge = Gauge(table.path)
    descriptor = os.open(table.path, os.O_RDONLY)
    for reads in (3, 4):
        gauge.start()
        for _ in range(reads):
            os.pread(descriptor, 1, 0)
        gauge.stop()
        os.pread(descriptor, 1, 0)
    os.close(descriptor)
    assert gauge.total.syscr == 7


def test_counts_what_the_device_gave(table: TableSpec) -> None:
    if host.io_counters() is None:
        pytest.skip("this kernel does not count reads")
    for found in page_ranges(table):
        drop_pages(found)
    gauge = Gauge(table.path)
    gauge.start()
    Path(table.path).read_bytes()
    gauge.stop()
    assert (gauge.total.device_read_bytes or 0) >= table.table_bytes // 2


def test_what_is_not_counted_here_stays_unknown(table: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "io_counters", lambda: None)
    gauge = Gauge(table.path)
    monkeypatch.setattr(gauge, "_disk", Path("/sys/block/none/stat"))
    gauge.start()
    gauge.stop()
    found = gauge.total
    assert (found.syscr, found.device_read_bytes, found.disk_reads, found.disk_read_s) == (None,) * 4
    assert found.user_s >= 0


def test_counters_are_added_and_subtracted_one_by_one() -> None:
    one, two = Counters(1.0, 2.0, 3, 4, None, 6, 7.0), Counters(0.5, 0.5, 1, 1, 1, None, 1.0)
    assert one - two == Counters(0.5, 1.5, 2, 3, None, None, 6.0)
    assert one + two == Counters(1.5, 2.5, 4, 5, None, None, 8.0)


def test_per_second_of_cpu() -> None:
    assert Counters(user_s=0.5, system_s=1.5).per_cpu_s(1000) == 500
    assert Counters().per_cpu_s(1000) is None
