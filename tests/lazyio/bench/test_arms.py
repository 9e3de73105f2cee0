from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lazyio import host
from lazyio.bench.arms import Course, without_cache
from lazyio.bench.equal import Verifier
from lazyio.bench.gauge import Counters
from lazyio.bench.residency import resident_pages
from lazyio.bench.runs import Arm
from lazyio.bench.workload import Cut, Workload, uniform
from lazyio.errors import RunsDifferError, Unsupported
from lazyio.fetchers.base import Bytes, Landed, ReadPlan, ReadStats
from lazyio.fetchers.pread import PreadFetcher
from lazyio.ple.spec import TableSpec

BUFFERED = {"direct_io": "off"}


@pytest.fixture
def workload(table: TableSpec) -> Workload:
    return uniform(table, 100, Cut(40), 0)


@pytest.fixture
def course(table: TableSpec, workload: Workload) -> Course:
    return Course(table, workload, 1234, Verifier(table, workload, 0))


def test_a_cold_run_begins_without_a_page_in_memory(course: Course, table: TableSpec) -> None:
    course.measure(Arm("on", "on"), "warm")
    assert resident_pages(table) > 0
    run = course.measure(Arm("on", "on"), "cold")
    assert (run.temperature, run.section, run.resident_pages_before) == ("cold", "cold", 0)
    assert (run.mode, run.arm, run.backend_used, run.direct_io) == ("on", "on", "mmap", False)
    assert (run.rows, run.windows) == (1600, 1234)
    assert run.unique_rows == course.workload.unique_rows
    if host.io_counters() is not None:
        assert (run.device_read_bytes or 0) > 0
    assert run.p50_us is None


def test_what_is_a_rate_fits_what_was_counted(course: Course) -> None:
    run = course.measure(Arm("on", "on"), "cold")
    assert run.rows_per_s == pytest.approx(1600 / run.wall_s)
    assert run.reads_per_s == pytest.approx(1234 / run.wall_s)
    assert run.user_s + run.system_s > 0
    assert run.rows_per_cpu_s == pytest.approx(1600 / (run.user_s + run.system_s))


def test_a_fetcher_that_sees_its_reads_says_how_long_they_took(course: Course) -> None:
    run = course.measure(Arm("pool", "on-direct", {"direct_io": "on", "workers": 3}), "cold")
    if not run.direct_io:
        pytest.skip("no direct I/O here")
    assert (run.arm, run.backend_used, run.workers, run.service_source) == ("pool", "pread", 3, "fetcher")
    assert run.reads > 0
    assert run.service_us_mean is not None
    assert run.effective_concurrency == pytest.approx(run.service_us_mean * run.reads / 1e6 / run.wall_s)


def test_a_warm_run_reads_nothing(course: Course) -> None:
    run = course.measure(Arm("on", "on"), "warm")
    assert run.temperature == "warm"
    assert run.resident_pages_before > 0
    assert run.major_faults == 0
    assert not run.device_read_bytes


def test_without_a_device_read_of_its_own_a_run_has_no_service_time(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others may have read meanwhile.
    monkeypatch.setattr("lazyio.bench.gauge.Gauge._disk_counters", lambda gauge: next(disk))
    disk = ((100 * call, 1.0 * call) for call in range(10_000))
    run = course.measure(Arm("on", "on"), "warm")
    if run.device_read_bytes is None:
        pytest.skip("this kernel does not count reads")
    assert (run.service_us_mean, run.effective_concurrency, run.service_source) == (None, None, None)
    run = course.measure(Arm("on", "on"), "cold")
    assert run.service_source == "device"
    assert run.service_us_mean == pytest.approx(1e4)


@pytest.mark.parametrize("arm", [Arm("on-bare", "on-bare"), Arm("on", "on"), Arm("on-direct", "on-direct", BUFFERED)])
def test_preloaded_rows_are_not_read_from_the_device(course: Course, table: TableSpec, arm: Arm) -> None:
    run = course.measure(arm, "preloaded")
    assert run.temperature == "preloaded"
    pages = math.ceil(table.table_bytes / 4096)
    assert 0 < run.resident_pages_before <= pages
    assert run.major_faults == 0
    assert not run.device_read_bytes


def test_only_the_rows_asked_for_are_preloaded(table: TableSpec) -> None:
    one = Workload((np.array([5, 20_000]),), "", None, None)
    run = Course(table, one, 2, Verifier(table, one, 0)).measure(Arm("on-bare", "on-bare"), "preloaded")
    assert 2 <= run.resident_pages_before <= 4


def test_steps_of_decoding_are_timed_one_by_one(table: TableSpec) -> None:
    steps = uniform(table, 30, Cut(1, decode=True), 0)
    run = Course(table, steps, 480, Verifier(table, steps, 0)).measure(Arm("on", "on"), "cold")
    assert run.rows == 480
    assert run.p50_us is not None
    assert run.p99_us is not None
    assert 0 < run.p50_us <= run.p99_us <= 1e6 * run.wall_s


def test_a_table_in_memory_is_neither_cold_nor_warm(course: Course) -> None:
    run = course.measure(Arm("off", "off", {}), "cold")
    assert (run.temperature, run.section, run.backend_used) == ("resident", "cold", "resident")


def test_a_wrong_byte_voids_the_comparison(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = Arm("on-direct", "on-direct", {"direct_io": "on"})
    if not course.measure(arm, "cold").direct_io:
        pytest.skip("no direct I/O here")
    true_read = PreadFetcher.read

    def wrong(self: PreadFetcher, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        stats = true_read(self, plan, buffer)
        buffer[: plan.buffer_bytes : 64] ^= 1
        return stats

    monkeypatch.setattr(PreadFetcher, "read", wrong)
    with pytest.raises(RunsDifferError, match=r"on-direct gave wrong bytes: .* of ubatch 0"):
        course.measure(arm, "cold")
    monkeypatch.setattr(course.verifier, "_sample", {})
    with pytest.raises(RunsDifferError, match="on-direct and on-direct gave different bytes for ubatch 0"):
        course.measure(arm, "cold")


def test_what_falls_back_is_named_and_refused_where_that_is_asked(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any, **more: Any) -> None:
        raise Unsupported("no io_uring in this kernel")

    monkeypatch.setattr("lazyio.fetchers.uring.UringFetcher.__init__", refused)
    run = course.measure(Arm("uring", "uring"), "cold")
    assert (run.mode, run.backend_used) == ("uring", "pread")
    assert run.fallback_reason is not None
    assert "no io_uring in this kernel" in run.fallback_reason
    strict = Course(course.spec, course.workload, 1234, course.verifier, strict=True)
    with pytest.raises(Unsupported, match="no io_uring in this kernel"):
        strict.measure(Arm("uring", "uring"), "cold")


def test_rows_of_many_ubatches_are_held_a_group_at_a_time(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyio.bench.arms._OUTPUT_BYTES", 1)
    held: list[object] = []

    def gather(ids: Any, out: Bytes) -> None:
        held.append(len(out))

    monkeypatch.setattr(Verifier, "check", lambda verifier, arm, ubatch, rows: held.append((arm, ubatch)))
    latencies, counted = course.time("arm", gather)
    assert held == [640, ("arm", 0), 640, ("arm", 1), 320, ("arm", 2)]
    assert len(latencies) == 3
    assert isinstance(counted, Counters)


def test_only_warm_runs_have_a_row_cache() -> None:
    assert without_cache(Arm("uring", "uring", BUFFERED)) == {"row_cache": 0, "direct_io": "off"}
    assert without_cache(Arm("on", "on")) == {}


def test_a_cold_run_reads_again_what_an_earlier_ubatch_has_read(table: TableSpec) -> None:
    ids = np.arange(0, table.rows, 50)
    workload = Workload((ids, ids), "twice the same", None, None)
    course = Course(table, workload, len(ids), Verifier(table, workload, 0))
    run = course.measure(Arm("on-direct", "on-direct", {"direct_io": "on"}), "cold")
    if not run.direct_io:
        pytest.skip("no direct I/O here")
    assert run.reads >= 2 * len(ids)
    assert run.cache_hits == 0


def test_a_warm_run_past_the_page_cache_is_answered_by_the_row_cache(course: Course) -> None:
    run = course.measure(Arm("on-direct", "on-direct", {"direct_io": "on"}), "warm")
    if not run.direct_io:
        pytest.skip("no direct I/O here")
    assert (run.cache_hits, run.reads) == (run.rows, 0)
