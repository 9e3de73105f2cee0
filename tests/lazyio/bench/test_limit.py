from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio.bench.limit import DECODE_DEPTH, DEPTHS, POOL_WORKERS, DeviceLimit
from lazyio.bench.residency import resident_pages
from lazyio.bench.runs import Mark, Run
from lazyio.bench.workload import Cut, Workload, uniform
from lazyio.errors import Unsupported
from lazyio.fetchers.base import Bytes, Fetcher, Landed, ReadPlan, ReadStats
from lazyio.fetchers.registry import load
from lazyio.ple.spec import TableSpec


@pytest.fixture
def workload(table: TableSpec) -> Workload:
    return uniform(table, 60, Cut(20), 0)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[ReadPlan]:
    """What limits have read; each window is compared with a plain read."""
    seen: list[ReadPlan] = []
    true_load = load

    def spying(name: str) -> type[Fetcher]:
        fetcher = true_load(name)

        class Spy(fetcher):  # type: ignore[valid-type, misc]
            def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
                stats = super().read(plan, buffer, landed)
                if not plan.needed.any():  # a probing read
                    return stats
                seen.append(plan)
                for window in range(len(plan)):
                    offset, needed, dest = (int(array[window]) for array in (plan.offset, plan.needed, plan.dest))
                    there = os.pread(self.files.descriptors[plan.file[window]], needed, offset)
                    assert buffer[dest : dest + needed].tobytes() == there
                return stats

        return Spy

    monkeypatch.setattr("lazyio.bench.limit.load", spying)
    return seen


def limit_of(spec: TableSpec, workload: Workload, **more: Any) -> DeviceLimit:
    return DeviceLimit(spec, workload, **({"block_bytes": 0, "reads": 1000, "seed": 0, "strict": False} | more))


def test_the_windows_of_the_workload_are_read_once_each_in_changing_order(
    table: TableSpec, plans: list[ReadPlan]
) -> None:
    workload = uniform(table, 60, Cut(60), 0)
    limit = limit_of(table, workload)
    assert [limit.run().rate > 0 for _ in range(2)] == [True, True]
    first, second = (plan.offset.tolist() for plan in plans)
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first != second
    assert first != sorted(first)
    wanted = np.unique(np.concatenate(workload.ubatches)) * table.row_bytes + table.extents[0].offset
    starts = np.array(sorted(first))
    lengths = plans[0].length[np.argsort(plans[0].offset)]
    at = starts.searchsorted(wanted, side="right") - 1
    assert (wanted + table.row_bytes <= starts[at] + lengths[at]).all()


def test_no_more_reads_than_asked_for(table: TableSpec, workload: Workload, plans: list[ReadPlan]) -> None:
    limit = limit_of(table, workload, reads=30)
    limit.run()
    assert len(plans[0]) == 30
    assert limit.windows > 30
    (arm,) = limit.arms
    assert (arm.reads, arm.resident_pages_before) == (30, 0)


@pytest.mark.parametrize("decode", [False, True])
def test_every_run_begins_cold(table: TableSpec, monkeypatch: pytest.MonkeyPatch, decode: bool) -> None:
    limit = limit_of(table, uniform(table, 30, Cut(1, decode=True) if decode else Cut(20), 0))
    found: list[int] = []

    def opened(self: DeviceLimit, depth: int) -> Fetcher:
        found.append(resident_pages(table))
        return true_open(self, depth)

    true_open = DeviceLimit._open
    monkeypatch.setattr(DeviceLimit, "_open", opened)
    for _ in range(2):
        Path(table.path).read_bytes()
        limit.run()
    assert found == [0, 0]


def test_the_depth_is_the_best_of_those_tried(
    table: TableSpec, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = limit_of(table, workload)
    if limit.backend != "uring":
        pytest.skip("no io_uring here")
    assert limit.as_json() is None
    tried: list[int] = []
    rates = {512: [90.0, 110.0], 1024: [99.0, 500.0], 4096: [200.0, 100.0]}
    true_shuffled = DeviceLimit._shuffled

    def shuffled(self: DeviceLimit, depth: int, chosen: Any) -> Any:
        arm = true_shuffled(self, depth, chosen)
        tried.append(depth)
        rate = rates.get(depth, [1.0, 1.0])[tried.count(depth) - 1]
        return type(arm)(rate, arm.reads, arm.bytes_read, arm.wall_s, arm.service_us_mean, 0)

    monkeypatch.setattr(DeviceLimit, "_shuffled", shuffled)
    limit.choose_depth()
    assert tried == [*DEPTHS, *reversed(DEPTHS)]
    assert limit.depth_trials[1024] == 299.5
    assert limit.queue_depth == 1024
    assert limit.arms == []


def test_steps_of_decoding_are_read_one_at_a_time(table: TableSpec, plans: list[ReadPlan]) -> None:
    workload = uniform(table, 30, Cut(1, decode=True), 0)
    limit = limit_of(table, workload)
    limit.choose_depth()
    mark = limit.run()
    assert len(plans) == 30
    assert all(len(plan) <= 16 for plan in plans)
    assert sum(map(len, plans)) == limit.windows
    (arm,) = limit.arms
    assert arm.p50_us is not None
    assert arm.p99_us is not None
    assert mark.p50_us == arm.p50_us <= arm.p99_us
    found = limit.as_json()
    assert found is not None
    assert found["p50_us"] == arm.p50_us
    assert found["queue_depth"] in (DECODE_DEPTH, None)


def test_without_io_uring_a_pool_reads_and_it_is_said(
    table: TableSpec, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> Fetcher:
        raise Unsupported("this kernel has no io_uring")

    monkeypatch.setattr("lazyio.bench.limit.load", lambda name: refused if name == "uring" else load(name))
    limit = limit_of(table, workload)
    limit.choose_depth()
    limit.run()
    found = limit.as_json()
    assert found is not None
    assert (found["backend"], found["queue_depth"], found["workers"]) == ("pread", None, POOL_WORKERS)
    assert "this kernel has no io_uring" in found["fallback_reason"]
    assert found["iops"] == limit.iops == limit.arms[0].reads_per_s
    with pytest.raises(Unsupported, match=r"can't be measured as asked: .*this kernel has no io_uring"):
        limit_of(table, workload, strict=True)


def test_without_direct_io_the_limit_is_buffered_and_it_is_said(
    table: TableSpec, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyio.fetchers.direct.direct_alignment", lambda descriptor: None)
    limit = limit_of(table, workload)
    limit.run()
    found = limit.as_json()
    assert found is not None
    assert found["direct_io"] is False
    assert found["fallback_reason"]


def test_a_run_is_beside_the_two_next_to_it(table: TableSpec, workload: Workload, make_run: Callable[..., Run]) -> None:
    limit = limit_of(table, workload)
    run = make_run(reads_per_s=90_000.0, p50_us=300.0)
    limit.compare(run, Mark(80_000.0, 100.0), Mark(120_000.0, 140.0))
    assert (run.limit_before, run.limit_after) == (80_000.0, 120_000.0)
    assert run.ratio_to_device_limit == 0.9
    assert run.p50_over_limit == 2.5


def test_what_is_in_memory_has_no_ratio(table: TableSpec, workload: Workload, make_run: Callable[..., Run]) -> None:
    run = make_run("off", temperature="resident")
    limit_of(table, workload).compare(run, Mark(1.0), Mark(1.0))
    assert (run.limit_before, run.ratio_to_device_limit) == (1.0, None)
