from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lazyio.bench.arms import Course
from lazyio.bench.cold import make_cold
from lazyio.bench.equal import Verifier
from lazyio.bench.runs import Mark, Run
from lazyio.bench.take import TakeBaseline
from lazyio.bench.workload import Cut, uniform
from lazyio.errors import RunsDifferError
from lazyio.ple.spec import TableSpec


def baseline(spec: TableSpec, decode: bool = False) -> TakeBaseline:
    workload = uniform(spec, 60, Cut(1, decode=True) if decode else Cut(20), 0)
    return TakeBaseline(Course(spec, workload, 0, Verifier(spec, workload, 0)))


@pytest.mark.parametrize("decode", [False, True])
def test_takes_the_true_rows(table: TableSpec, decode: bool) -> None:
    take = baseline(table, decode)
    assert take.possible
    assert take.as_json() is None
    marks = [take.run() for _ in range(3)]  # a sample of the rows is compared with plain reads, or this raises
    assert [mark.rate for mark in marks] == [arm.rows_per_s for arm in take.arms]
    found = take.as_json()
    assert found is not None
    assert found["rows_per_s"] == sorted(mark.rate for mark in marks)[1]
    assert set(found["arms"][0]) == {"rows_per_s", "rows_per_cpu_s", "wall_s"}


def test_wrong_rows_are_noticed(table: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    take = baseline(table)
    (extent,) = table.extents
    shifted = replace(table, extents=(replace(extent, offset=extent.offset + 1, rows=extent.rows - 1),))
    monkeypatch.setattr(take, "_course", replace(take._course, spec=shifted))
    with pytest.raises(RunsDifferError, match=r"np\.take gave wrong bytes"):
        take.run()


def test_nothing_stays_mapped(table: TableSpec) -> None:
    baseline(table).run()
    make_cold(table)


def test_rows_in_several_places_are_no_array(table: TableSpec) -> None:
    (extent,) = table.extents
    half = extent.rows // 2
    parts = (
        replace(extent, rows=half),
        replace(extent, offset=extent.offset + half * table.row_bytes, first_row=half, rows=extent.rows - half),
    )
    assert not baseline(replace(table, extents=parts)).possible


def test_a_run_is_beside_the_two_next_to_it(table: TableSpec, make_run: Callable[..., Run]) -> None:
    run = make_run(rows_per_s=3e6)
    baseline(table).compare(run, Mark(3e6), Mark(5e6))
    assert (run.take_before, run.take_after, run.ratio_to_take) == (3e6, 5e6, 0.75)
    assert run.ratio_to_device_limit is None


def test_the_passes_that_are_timed_follow_one_that_is_not(table: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cold(table)
    calls: list[int] = []
    true_take = np.take

    def counting(*arguments: object, **more: object) -> object:
        calls.append(1)
        return true_take(*arguments, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(np, "take", counting)
    baseline(table).run()
    assert len(calls) == 3 + 3 * 3  # ubatches, untimed and timed
