"""What bounds a run: the rules, and runs that something is planted in."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lazyio.bench.bound import Pipelined, Reading, bound_of_pipeline, bound_of_reading, bound_of_run
from lazyio.bench.options import Request
from lazyio.bench.outcome import Outcome
from lazyio.bench.pipeline import execute_pipeline
from lazyio.bench.pipeline_view import show_pipeline
from lazyio.bench.report import show
from lazyio.bench.runs import Run
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.table import open_table

SLEEP = time.sleep  # the fixtures of this folder put another in its place

WAITING = Reading(
    wall_s=2.0, cpu_s=0.2, all_cpu_s=0.3, reads_device=True, of_limit=0.2, in_flight=30.0, limit_in_flight=500.0
)
PROMPT = Pipelined(wall_s=1.0, computing_s=0.4, kept=0.99, reading=WAITING, beside=1.0)


@pytest.mark.parametrize(
    ("measured", "by", "reason"),
    [
        ({"of_limit": 0.7}, "device", "it gave reads at 0.70 of its limit"),
        ({"of_limit": 1.2, "cpu_s": 1.9}, "device", "it gave reads at 1.20 of its limit"),
        ({"cpu_s": 1.4}, "cpu", "on a processor 70% of the time; reads came at 0.20 of the device's limit"),
        ({"all_cpu_s": 5.6}, "cpu", "threads and kernel used 2.80 of 4 processors"),
        ({"cpu_s": 1.0}, "both", "on a processor 50% of the time, and waited for reads else"),
        ({"reads_device": False}, "cpu", "nothing was read from the device"),
        ({}, "latency", "30 reads in flight on average instead of 500, each taking 0.30 times as long"),
        ({"in_flight": 1.0, "of_limit": 0.1}, "latency", "1.00 reads in flight"),
        ({"in_flight": 450.0, "of_limit": 0.1}, "device", "450 reads in flight .* each taking 9.00 times as long"),
        ({"in_flight": None}, "latency", "and the processors were idle"),
        ({"in_flight": 0.0}, "latency", "and the processors were idle"),
        ({"of_limit": None}, "device", "waited for reads else; the limit was not measured"),
    ],
)
def test_gathers(measured: dict[str, Any], by: str, reason: str) -> None:
    bound = bound_of_reading(replace(WAITING, **measured), cpus=4)
    assert bound.by == by
    assert re.search(reason, bound.reason)


@pytest.mark.parametrize(
    ("measured", "by", "reason"),
    [
        ({"computing_s": 0.7, "beside": 0.1}, "compute", "computing took 70% of the time"),
        ({"computing_s": 0.5}, "compute", "computing took 50% of the time"),
        ({"computing_s": 0.6, "beside": 0.3}, "gil", "kept the interpreter 99% .* at 0.30 of the rate of the first"),
        ({"computing_s": 0.3, "beside": 0.3}, "gil", "kept the interpreter"),
        ({"beside": 0.3, "kept": 0.01}, "latency", "reads in flight"),  # computing slept: the device is slower now
        ({"beside": 0.3, "reading": replace(WAITING, of_limit=0.7)}, "device", "it gave reads at 0.70 of its limit"),
        ({"beside": None}, "latency", "reads in flight"),
        ({}, "latency", "reads in flight"),
    ],
)
def test_prompts(measured: dict[str, Any], by: str, reason: str) -> None:
    bound = bound_of_pipeline(replace(PROMPT, **measured), cpus=4)
    assert bound.by == by
    assert re.search(reason, bound.reason)


@given(
    wall=st.floats(1e-6, 1e3),
    share=st.floats(0, 1.1),
    more=st.floats(0, 8),
    reads=st.booleans(),
    limit=st.none() | st.floats(1e-6, 100),
    flight=st.tuples(*[st.none() | st.floats(0, 1e4)] * 2),
)
def test_whatever_was_measured_there_is_one_word(
    wall: float, share: float, more: float, reads: bool, limit: float | None, flight: tuple[float | None, float | None]
) -> None:
    bound = bound_of_reading(Reading(wall, wall * share, wall * (share + more), reads, limit, *flight), cpus=2)
    assert bound.by in ("device", "cpu", "latency", "both")
    assert bound.reason


def test_a_run_reads_the_device_where_the_kernel_counted_it(make_run: Callable[..., Run]) -> None:
    idle = {"user_s": 0.0, "system_s": 0.0, "caller_cpu_s": 0.0}
    for measured, by in (
        ({"device_read_bytes": 0}, "cpu"),
        ({"device_read_bytes": 4096}, "device"),
        ({"device_read_bytes": None}, "device"),
        ({"device_read_bytes": None, "reads": 0}, "cpu"),
        ({"device_read_bytes": None, "reads": 0, "major_faults": 1}, "device"),
    ):
        assert bound_of_run(make_run(**idle, **measured), cpus=2).by == by


def test_what_others_read_meanwhile_is_not_this_run_s(make_run: Callable[..., Run]) -> None:
    limit = {"ratio_to_device_limit": 0.1, "limit_in_flight": 100.0}
    idle = {"user_s": 0.0, "system_s": 0.0, "caller_cpu_s": 0.0, "reads_per_s": 8000.0, "service_us_mean": 125.0}
    busy_disk = make_run(**limit, **idle, effective_concurrency=200.0, service_source="device")
    bound = bound_of_run(busy_disk, cpus=2)
    assert (bound.by, "1.00 reads in flight" in bound.reason) == ("latency", True)
    assert bound_of_run(replace(busy_disk, service_source="fetcher"), cpus=2).by == "device"


# --- planted ---------------------------------------------------------------------------------------------------------


def test_every_run_says_what_bounds_it(compare: Callable[..., Outcome], console: Console) -> None:
    outcome = compare(cold=True, warm=True, modes="on-bare,on")
    for run in outcome.as_json()["runs"]:
        assert run["bound_by"] in ("device", "cpu", "latency", "both")
        assert run["bound_reason"]
        assert 0 < run["caller_cpu_s"] < run["wall_s"] + 0.005
    for arm in outcome.as_json()["summary"]["cold"]["arms"]:
        assert arm["bound_by"]
    show(outcome, console)
    assert ": on-bare is bound by " in console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_in_the_page_cache_cost_the_processor(compare: Callable[..., Outcome]) -> None:
    runs = compare(preload="hot-set", modes="on,on-direct").sections[0].runs
    assert {run.bound_by for run in runs} == {"cpu"}


def test_a_slow_disk_is_the_device(compare: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", SLEEP)
    slow = Faults(late=1.0, delay_s=0.3)
    opened = functools.partial(open_table, wrap=lambda fetcher: with_faults(fetcher, slow))
    monkeypatch.setattr("lazyio.bench.arms.open_table", opened)
    run = compare(modes="on-direct", direct_io="on", ubatch=100).sections[0].runs[0]
    assert run.bound_by == "device"
    assert "times as long" in (run.bound_reason or "")


def test_reads_one_after_the_other_are_latency(compare: Callable[..., Outcome]) -> None:
    run = compare(modes="on-direct", direct_io="on", workers="1").sections[0].runs[0]
    if not run.direct_io or (run.ratio_to_device_limit or 1) > 0.5:
        pytest.skip("this device gives no more to many readers than to one")
    assert run.bound_by in ("latency", "cpu", "both")


def test_a_prompt_that_computes_for_long(gguf_path: Path, console: Console) -> None:
    asked: dict[str, Any] = {"compute_us_per_token": 6000.0, "spin": True, "tokens": 60, "ubatch": 30}
    outcome = execute_pipeline(
        Request(path=gguf_path, pipeline=True, modes="on-direct", rounds=1, limit_reads=200, **asked), console
    )
    for run in outcome.as_json()["runs"]:
        assert run["bound_by"] == "compute"
        assert run["reading_s"] > 0
        assert 0 <= run["reading_cpu_s"] < run["wall_s"]
    show_pipeline(outcome, console)
    assert "bound by compute; computing took " in console.file.getvalue()  # type: ignore[attr-defined]
