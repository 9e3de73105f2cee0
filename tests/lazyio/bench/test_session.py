from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lazyio.bench import save_trace, session
from lazyio.bench.options import Request
from lazyio.bench.outcome import Outcome
from lazyio.bench.session import execute
from lazyio.bench.take import TakeBaseline
from lazyio.errors import NotCold, RunsDifferError, SettingError, Unsupported
from lazyio.fetchers.mmap import MmapFetcher
from lazyio.ple.spec import TableSpec

Compare = Callable[..., Outcome]


def test_cold_rounds_are_beside_the_device(compare: Compare) -> None:
    outcome = compare(modes="on-bare,on", rounds=2)
    (section,) = outcome.sections
    assert [(run.arm, run.round, run.again) for run in section.runs] == [
        ("on", 0, True),
        ("on-bare", 0, False),
        ("on", 0, False),
        ("on", 1, False),
        ("on-bare", 1, False),
        ("on", 1, True),
    ]
    assert len(outcome.limit.arms) == 2 * 4
    assert outcome.take.arms == []
    assert all(run.resident_pages_before == 0 for run in section.runs)
    assert all(run.ratio_to_device_limit and run.ratio_to_take is None for run in section.runs)
    assert outcome.proved_pages > 800


def test_warm_rounds_are_beside_np_take(compare: Compare) -> None:
    outcome = compare(warm=True)
    (section,) = outcome.sections
    assert outcome.limit.arms == []
    assert len(outcome.take.arms) == 3
    assert all(run.ratio_to_take and run.ratio_to_device_limit is None for run in section.runs)
    assert outcome.proved_pages == 0


def test_both_temperatures(compare: Compare) -> None:
    outcome = compare(cold=True, warm=True, min_iops=1.0)
    assert [section.temperature for section in outcome.sections] == ["cold", "warm"]
    assert [section.rules.min_iops for section in outcome.sections] == [1.0, 0.0]


def test_preloaded_rounds_are_beside_nothing(compare: Compare) -> None:
    outcome = compare(preload="hot-set", modes="on-bare,on,on-direct")
    (section,) = outcome.sections
    assert outcome.limit.arms == outcome.take.arms == []
    assert {run.temperature for run in section.runs} == {"preloaded"}
    assert not any(run.direct_io or run.device_read_bytes or run.major_faults for run in section.runs)


def test_decoding(compare: Compare) -> None:
    outcome = compare(decode=True, steps=20, cold=True, warm=True)
    cold, warm = outcome.sections
    assert all(run.p50_us and run.p99_us and run.p50_over_limit for run in cold.runs)
    assert all(run.p50_us and run.p50_over_limit is None for run in warm.runs)
    assert outcome.limit.windows <= outcome.workload.rows == 320


def test_a_trace_is_repeated(compare: Compare, tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    save_trace(trace, [np.array([5, 5, 39_999]), np.array([0])])
    outcome = compare(trace=trace, tokens=None, ubatch=None)
    assert {(run.rows, run.unique_rows) for run in outcome.sections[0].runs} == {(4, 3)}


def test_a_table_in_several_places_has_no_take(
    compare: Compare, table: TableSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    (extent,) = table.extents
    parts = (
        replace(extent, rows=100),
        replace(extent, offset=extent.offset + 9000, first_row=100, rows=extent.rows - 100),
    )
    monkeypatch.setattr(session, "find_table", lambda path, tensor: replace(table, extents=parts))
    outcome = compare(warm=True)
    assert all(run.ratio_to_take is None for run in outcome.sections[0].runs)
    assert outcome.as_json()["take_limit"] is None


def test_nothing_is_measured_where_nothing_can_be_cold(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    monkeypatch.setattr("lazyio.host.owns_or_writes", lambda path: False)
    with pytest.raises(NotCold, match="neither owns the file"):
        compare()
    with pytest.raises(NotCold, match="neither owns the file"):
        compare(preload="hot-set")
    compare(warm=True)


def test_a_wrong_byte_voids_everything(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    true_take = MmapFetcher.take

    def wrong(self: MmapFetcher, ids: Any, out: Any) -> Any:
        stats = true_take(self, ids, out)
        if not self.options.advice:
            out[-1, -1] ^= 1
        return stats

    monkeypatch.setattr(MmapFetcher, "take", wrong)
    compare(modes="on")
    with pytest.raises(RunsDifferError, match=r"on(-bare)? (and on(-bare)? gave different|gave wrong) bytes"):
        compare(modes="on,on-bare")


def test_strict_refuses_what_would_fall_back(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **more: Any) -> None:
        raise Unsupported("no io_uring in this kernel")

    monkeypatch.setattr("lazyio.fetchers.uring.UringFetcher.__init__", refused)
    outcome = compare(modes="uring")
    assert all("no io_uring" in (run.fallback_reason or "") for run in outcome.sections[0].runs)
    for warm in (False, True):
        with pytest.raises(Unsupported, match="no io_uring in this kernel"):
            compare(modes="uring", warm=warm, strict=True)
    with pytest.raises(Unsupported, match="the device's limit can't be measured as asked"):
        compare(modes="on", strict=True)
    compare(modes="on", warm=True, strict=True)


def test_a_contradiction_is_said_before_a_demo_table_is_made(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "demo_table", lambda *arguments: pytest.fail("made a table"))
    with pytest.raises(SettingError):
        execute(Request(modes="on", workers="8"), console)
    with pytest.raises(SettingError):
        execute(Request(steps=8), console)


def test_without_a_path_the_demo_table_is_measured(
    console: Console, gguf_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "demo_table", lambda folder, console: gguf_path)
    outcome = execute(Request(modes="on", warm=True, rounds=1, tokens=50), console)
    assert outcome.spec.path == str(gguf_path)


def test_an_unsteady_machine_is_measured_again(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1.0, 2.0] + [1.0] * 10)
    true_run = TakeBaseline.run
    monkeypatch.setattr(TakeBaseline, "run", lambda take: replace(true_run(take), rate=next(rates)))
    monkeypatch.setattr("lazyio.bench.rounds.STEADY_WITHIN", 1.3)
    outcome = compare(warm=True, max_repeats=1)
    (section,) = outcome.sections
    assert [repeat.reason for repeat in section.repeats] == ["unsteady: np.take 1 and 2 rows/s next to one run"]
    assert [run.counted for run in section.runs] == [False, True, True]
