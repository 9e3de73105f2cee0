from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lazyio.bench.abba.journal import Journal, Run
from lazyio.bench.abba.plan import Plan
from lazyio.bench.abba.report import accepted, as_json, results, show, write_json

MakePlan = Callable[..., Plan]
MakeRun = Callable[..., Run]
Fill = Callable[..., Journal]


def gpu(**more: Any) -> dict[str, Any]:
    base = {
        "index": 0.0,
        "name": "GPU A",
        "sm_mhz": 1980.0,
        "memory_mhz": 2619.0,
        "power_w": 300.0,
        "temperature_c": 60.0,
    }
    return base | {"busy_percent": 0.0, "memory_used_mib": 4.0} | more


@pytest.fixture
def plan(make_plan: MakePlan) -> Plan:
    return make_plan(cells={"2k": {}, "8k": {}}, cold={"model": "m"}, rounds=4)


@pytest.fixture
def journal(plan: Plan, tmp_path: Path) -> Any:
    with Journal(tmp_path / "state.jsonl", plan.as_json()) as journal:
        journal.begin({"cpu": "x", "kernel": "1"}, "now")
        yield journal


def fill(journal: Journal, make_run: MakeRun, cell: str, b: float, rounds: int = 4, **more: Any) -> None:
    """Rounds in which b's time is `b` times that of a, and the noise is one percent or so."""
    for number in range(rounds):
        a = 1.0 + 0.1 * number
        runs = [make_run("a", a, **more), make_run("b", b * a, **more), make_run("a", 1.01 * a, again=True, **more)]
        journal.add_round(cell, runs[::-1] if number % 2 else runs)


def shown(plan: Plan, journal: Journal) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(plan, journal, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_of_a_cell(plan: Plan, journal: Journal, make_run: MakeRun) -> None:
    fill(journal, make_run, "2k", 1.25)
    fill(journal, make_run, "8k", 0.5)
    text = shown(plan, journal)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "2k: 4 rounds"
    assert "metric arm mean [min, max] ±2 SE median [min, max] mean ±2 SE slower verdict" in lines
    assert "x a 1.15 [1, 1.3] ±0.129" in lines
    assert "b 1.44 [1.25, 1.62] ±0.161 0.800 [0.800, 0.800] 0.800 ±0.000 4 of 4 SLOWER" in lines
    assert "a (again) 1.16 [1.01, 1.31] ±0.13 0.990 [0.990, 0.990] 0.990 ±0.000 4 of 4 noise ±0.010" in lines
    assert "b 0.575 [0.5, 0.65] ±0.0645 2.000 [2.000, 2.000] 2.000 ±0.000 0 of 4 faster" in lines
    assert "SLOWER beyond the noise: b in 2k, x: 0.800 ±0.000." in lines
    assert "No arm is slower" not in text
    assert "Cold: before each run no OS page of the table was in memory, as mincore tells." in text
    assert "Outputs: tokens, logits must be equal in all runs of a cell." in lines
    assert max(len(line) for line in text.partition("Arms take turns")[0].splitlines()) <= 120
    assert not accepted(results(plan, journal))


def test_nothing_is_slower(plan: Plan, journal: Journal, make_run: MakeRun) -> None:
    fill(journal, make_run, "2k", 1.005)
    fill(journal, make_run, "8k", 1.0)
    text = shown(plan, journal)
    assert text.count("in the noise") == 2
    assert (
        "No arm is slower beyond its noise in 2 of 2 cells; a slow-down of more than 1.0 % would have shown in all of "
        "them, of 1.0 % in the quietest." in text
    )
    assert accepted(results(plan, journal))


def test_cells_that_are_not_complete(plan: Plan, journal: Journal, make_run: MakeRun) -> None:
    fill(journal, make_run, "2k", 3.0, rounds=2)
    journal.add_failed("2k", "b: status 1")
    journal.add_void("8k", "tokens is t of a and u of b")
    text = shown(plan, journal)
    assert "2k: 2 of 4 rounds, NOT COMPLETE" in text
    assert "SLOWER" not in text
    assert "noise ±" not in text
    assert "2k: FAILED after 2 rounds: b: status 1" in text
    assert "8k: VOID, its outputs differ: tokens is t of a and u of b." in text
    assert "2 of 2 cells are not complete, and not judged." in text
    assert not accepted(results(plan, journal))


def test_what_the_machine_was_like(plan: Plan, journal: Journal, make_run: MakeRun) -> None:
    idle = {"load": 0.5, "cpu_mhz": None, "gpus": [gpu(sm_mhz=345.0, temperature_c=31.0, power_w=None)]}
    fill(journal, make_run, "2k", 1.0, 2, before=idle, after={"load": 9.0, "cpu_mhz": None, "gpus": [gpu()]})
    journal.begin({"cpu": "y", "kernel": "1"}, "later")
    fill(
        journal, make_run, "2k", 1.0, 2, before=idle, after={"load": 9.0, "cpu_mhz": None, "gpus": [gpu(sm_mhz=1500.0)]}
    )
    fill(journal, make_run, "8k", 1.0)
    text = shown(plan, journal)
    assert "Before runs: load 0.5. Processors: 2,000 MHz." in text
    assert (
        "GPU 0, GPU A: temperature 31 to 60 C, SM clock after runs 1,500 to 1,980 MHz, memory clock after runs 2,619 "
        "MHz, power after runs 300 W, busy before runs 0 %." in text
    )
    assert "2k: measured in 2 sittings, between which the machine's cpu changed; each round is of one of them." in text
    assert "8k: measured" not in text


def test_outputs_that_were_not_compared(make_plan: MakePlan, tmp_path: Path, make_run: MakeRun) -> None:
    plan = make_plan(equal=[], before_each="true", metrics={"x": {"better": "higher"}, "y": {}})
    with Journal(tmp_path / "state.jsonl", plan.as_json()) as journal:
        journal.begin({}, "now")
        fill(journal, make_run, "all", 1.0, 2, metrics={"x": 20_000.0, "y": 0.0})
        text = shown(plan, journal)
    assert "Outputs: NOT COMPARED, as the definition has it." in text
    assert "A command prepares each run." in text
    assert "Cold" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "x a 20.0k [20.0k, 20.0k] ±0" in lines
    assert "y a 0 [0, 0] ±0" in lines
    assert "b 0 [0, 0] ±0" in lines


def test_as_json(plan: Plan, journal: Journal, make_run: MakeRun, tmp_path: Path) -> None:
    fill(journal, make_run, "2k", 1.25)
    write_json(as_json(plan, journal), tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["accepted"] is False
    assert document["plan"] == plan.as_json()
    assert document["sittings"] == [{"cpu": "x", "kernel": "1"}]
    two, eight = document["cells"]
    assert (two["cell"], two["complete"], eight["complete"], eight["metrics"]) == ("2k", True, False, {})
    a, b, again = two["metrics"]["x"]["arms"]
    assert (a["arm"], a["times_as_fast"], b["verdict"], again["again"]) == ("a", None, "slower", True)
    assert b["times_as_fast"]["median"] == pytest.approx(0.8)
    assert two["metrics"]["x"]["noise"] == pytest.approx(1 - 1 / 1.01)
    assert len(document["runs"]) == 12
    assert document["runs"][3] | {"cell": "2k", "round": 1, "sitting": 0, "again": True} == document["runs"][3]


def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    write_json({"first": 1}, path)
    replaced = Path.replace

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28), str(target))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_json({"second": 2}, path)
    monkeypatch.setattr(Path, "replace", replaced)
    assert json.loads(path.read_text()) == {"first": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]
