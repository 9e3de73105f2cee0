from __future__ import annotations

import io
import json
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lazyio.bench.abba import session
from lazyio.bench.abba.definition import plan_of
from lazyio.bench.abba.journal import Journal
from lazyio.bench.abba.plan import Plan
from lazyio.bench.abba.session import Session, runs_left
from lazyio.bench.residency import page_ranges, resident_pages
from lazyio.bench.watch import Watch
from lazyio.errors import NeverFits, RunFailed
from lazyio.ple.spec import TableSpec

DOCUMENT = {"metrics": {"x": 2.0, "y": 0}, "tokens": "t", "logits": "l"}


class Bench:
    """Comparisons of arms a and b in cells that note in a file in which order they ran."""

    def __init__(self, folder: Path) -> None:
        self.ran, self.state = folder / "ran", folder / "state.jsonl"
        self.console = Console(file=io.StringIO(), width=200)

    def plan(self, *, a: str = ":", b: str = ":", **given: Any) -> Plan:
        """`a` and `b` are shell commands before the document is printed, or instead of it where they exit."""
        arms = {
            arm: {"command": ["sh", "-c", f"echo {arm}$CELL >> {self.ran}; {script}; echo '{json.dumps(DOCUMENT)}'"]}
            for arm, script in (("a", a), ("b", b))
        }
        cells = {"1": {"env": {"CELL": 1}}, "2": {"env": {"CELL": 2}}}
        base = {"arms": arms, "cells": cells, "rounds": 2, "metrics": {"x": {"better": "lower"}}}
        return plan_of(base | given)

    @contextmanager
    def journal(self, plan: Plan) -> Iterator[Journal]:
        with Journal(self.state, plan.as_json()) as journal:
            yield journal

    def run(self, plan: Plan, journal: Journal, budget_s: float | None = None) -> bool:
        return Session(plan, journal, Watch(self.console, 1), budget_s).execute()

    @property
    def order(self) -> list[str]:
        return self.ran.read_text().split() if self.ran.exists() else []

    @property
    def said(self) -> str:
        return self.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no GPUs
    return Bench(tmp_path)


def test_arms_take_turns_and_every_other_round_goes_backwards(bench: Bench) -> None:
    plan = bench.plan()
    with bench.journal(plan) as journal:
        assert runs_left(plan, journal) == 12
        assert bench.run(plan, journal)
        assert bench.order == ["a1", "b1", "a1", "a1", "b1", "a1", "a2", "b2", "a2", "a2", "b2", "a2"]
        turns = [[(run.arm, run.again) for run in turns] for turns in journal.cells["1"].rounds]
        assert turns == [[("a", False), ("b", False), ("a", True)], [("a", True), ("b", False), ("a", False)]]
        run = journal.cells["2"].runs[0]
        assert (run.metrics, run.equal, run.cold_pages) == ({"x": 2.0}, {"tokens": "t", "logits": "l"}, None)
        assert 0 < run.wall_s <= run.took_s
        assert run.before["gpus"] == []
        assert runs_left(plan, journal) == 0
        # Nothing is left to do.
        assert bench.run(plan, journal)
        assert len(bench.order) == 12
        assert len(journal.sittings) == 1
    assert "1, round 1 of 2: a (again) x 2" in bench.said


def test_an_interrupted_round_is_measured_again_and_nothing_else(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, ask, asked = bench.plan(), session.ask, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 5:
            raise KeyboardInterrupt
        return ask(*arguments)

    monkeypatch.setattr(session, "ask", interrupted)
    with bench.journal(plan) as journal, pytest.raises(KeyboardInterrupt):
        bench.run(plan, journal)
    first, done = bench.order, 3
    assert first == ["a1", "b1", "a1", "a1"]
    with bench.journal(plan) as journal:
        assert runs_left(plan, journal) == 9
        assert bench.run(plan, journal)
        assert journal.cells["1"].sittings == [0, 1]
    assert bench.order[len(first) :] == ["a1", "b1", "a1", "a2", "b2", "a2", "a2", "b2", "a2"]
    assert len(bench.order) == len(first) + 12 - done


@pytest.mark.parametrize(
    ("b", "told"),
    [
        ("exit 3", "b: `sh -c .*` ended with status 3; it said nothing"),
        ("echo no; exit 0", "gave no JSON object.*it said last:\nno"),
        ('echo "{\\"tokens\\": 1}"; exit 0', "there is nothing at metrics.x: the document is an object with tokens"),
        ('echo "{\\"process\\": 1}"; exit 0', "the key 'process', which stands for"),
    ],
)
def test_a_cell_that_fails_does_not_keep_others_from_being_measured(bench: Bench, b: str, told: str) -> None:
    plan = bench.plan(b=f'if [ "$CELL" = 1 ] && [ ! -e {bench.state}.mended ]; then {b}; fi')
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        assert bench.order == ["a1", "b1", "a2", "b2", "a2", "a2", "b2", "a2"]
        failed = journal.cells["1"].failed
        assert failed is not None
        assert re.search(told, failed, re.DOTALL), failed
        assert journal.cells["1"].rounds == []
        assert len(journal.cells["2"].rounds) == 2
        Path(f"{bench.state}.mended").touch()
        assert bench.run(plan, journal)
        assert journal.cells["1"].failed is None
        assert len(journal.cells["1"].rounds) == 2
    assert bench.order[8:] == ["a1", "b1", "a1", "a1", "b1", "a1"]


@pytest.mark.parametrize(("metric", "told"), [("y", "y is 0, of which no ratio"), ("none", "nothing at metrics.none")])
def test_metrics_that_cannot_be_judged(bench: Bench, metric: str, told: str) -> None:
    plan = bench.plan(metrics={metric: {"better": "higher"}})
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        assert told in str(journal.cells["1"].failed)
    assert bench.order == ["a1", "a2"]


@pytest.mark.parametrize("value", ['"fast"', "true", "null", "NaN", "1e999", "[1]"])
def test_figures_that_are_no_numbers(value: str) -> None:
    metric = plan_of({"arms": {"a": {"command": "x"}, "b": {"command": "y"}}}).metrics[0]
    with pytest.raises(RunFailed, match=r"wall_s is .* at process\.wall_s, and should be a number"):
        session.figure(metric, {"process": {"wall_s": json.loads(value)}})


def test_figures_of_several_values_are_their_median() -> None:
    (metric,) = plan_of(
        {"arms": {"a": {"command": "x"}, "b": {"command": "y"}}, "metrics": {"x": {"path": "r.*", "better": "lower"}}}
    ).metrics
    assert session.figure(metric, {"r": [9, 1, 4]}) == 4


def test_what_can_be_0_is_shown(bench: Bench) -> None:
    plan = bench.plan(metrics={"x": {"better": "lower"}, "y": {}, "s": {"path": "process.wall_s"}})
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        run = journal.cells["1"].runs[0]
        assert run.metrics == {"x": 2.0, "y": 0.0, "s": run.wall_s}


def test_a_cell_whose_outputs_differ_is_void_at_once(bench: Bench) -> None:
    other = DOCUMENT | {"logits": "m"}
    plan = bench.plan(b=f"if [ \"$CELL\" = 1 ]; then echo '{json.dumps(other)}'; exit 0; fi")
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        assert journal.cells["1"].void == "logits is l of a and m of b"
        assert journal.cells["2"].void is None
    assert bench.order == ["a1", "b1", "a2", "b2", "a2", "a2", "b2", "a2"]
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
    assert len(bench.order) == 8
    assert "1 is void: logits is l of a and m of b" in bench.said


def test_outputs_that_change_from_round_to_round(bench: Bench) -> None:
    other = DOCUMENT | {"tokens": list(range(100))}
    last = f"if [ \"$(wc -l < {bench.ran})\" -ge 6 ]; then echo '{json.dumps(other)}'; exit 0; fi"
    plan = bench.plan(a=last)
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        void = str(journal.cells["1"].void)
        assert void.startswith("tokens is t of a and blake2b ")
        assert void.endswith(" of a")
        assert len(journal.cells["1"].rounds) == 1
    plan = bench.plan(a=last, equal=[])
    bench.state.unlink()
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        assert journal.cells["1"].void is None


class Clock:
    """Time that passes only when a command runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *takes: float) -> None:
        self.now, self._takes, self.limits = 1000.0, list(takes), list[float | None]()
        ask = session.ask
        monkeypatch.setattr(session.time, "monotonic", lambda: self.now)

        def timed(command: Any, env: Any, timeout_s: float | None, keep: int) -> Any:
            self.limits.append(timeout_s)
            takes = self._takes.pop(0) if len(self._takes) > 1 else self._takes[0]
            if timeout_s is not None and takes > timeout_s:
                self.now += timeout_s
                raise RunFailed("took longer")
            self.now += takes
            return ask(command, env, 20.0, keep)

        monkeypatch.setattr(session, "ask", timed)


def test_a_budget_ends_before_a_round_that_would_overrun_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.plan(rounds=4)
    clock = Clock(monkeypatch, 10.0)
    with bench.journal(plan) as journal:
        assert not bench.run(plan, journal, 30 + 30 + 29 + session.GRACE_S)
        assert clock.now == 1060
        assert len(journal.cells["1"].rounds) == 2
        assert "ends: a round takes up to 30.0 s" in bench.said
        assert bench.run(plan, journal, 6 * 30 + 1 + session.GRACE_S)
        assert runs_left(plan, journal) == 0


def test_a_budget_ends_before_a_run_that_would_overrun_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.plan()
    clock = Clock(monkeypatch, *[1.0] * 6, 10.0)
    with bench.journal(plan) as journal:
        assert not bench.run(plan, journal, 6 + 29 + session.GRACE_S)
        assert clock.now == 1026  # two of the second cell's runs, and no third
        assert len(journal.cells["1"].rounds) == 2
        assert journal.cells["2"].rounds == []
        assert "ends: a takes up to 10.0 s" in bench.said


def test_a_run_that_nothing_is_known_of_is_ended_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.plan(timeout_s=50)
    clock = Clock(monkeypatch, *[1.0] * 6, 1000.0)
    with bench.journal(plan) as journal:
        assert not bench.run(plan, journal, 26 + session.GRACE_S)
        assert clock.now == 1026
        assert clock.limits[-1] == 20
        assert "ends: a had not ended" in bench.said
        assert journal.cells["2"].failed is None
        assert bench.run(plan, journal, None)
        assert clock.limits[-1] == 50
        assert journal.cells["2"].failed == "a: took longer"


@pytest.mark.parametrize("budget_s", [0.0, 5.0, 34.0])
def test_a_budget_that_never_suffices(bench: Bench, monkeypatch: pytest.MonkeyPatch, budget_s: float) -> None:
    plan = bench.plan()
    Clock(monkeypatch, 10.0)
    with (
        bench.journal(plan) as journal,
        pytest.raises(NeverFits, match=f"--budget-s {budget_s:g} does not hold one round of cell 1: .*give more"),
    ):
        bench.run(plan, journal, budget_s)


def test_a_command_before_each_run(bench: Bench) -> None:
    before = ["sh", "-c", f'echo "before$CELL" >> {bench.ran}; [ "$CELL" = 1 ]']
    plan = bench.plan(before_each=before)
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        assert "status 1" in str(journal.cells["2"].failed)
    assert " ".join(bench.order) == "before1 a1 before1 b1 before1 a1 " * 2 + "before2"


def test_tables_are_cold_when_a_command_starts(
    bench: Bench, gguf_path: Path, table: TableSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = f"cat {gguf_path} > /dev/null"
    plan = bench.plan(a=reads, b=reads, cold={"model": str(gguf_path)})
    ask, residents = session.ask, list[int]()

    def noted(*arguments: Any) -> Any:
        residents.append(resident_pages(table))
        answer = ask(*arguments)
        residents.append(resident_pages(table))
        return answer

    monkeypatch.setattr(session, "ask", noted)
    pages = sum(each.pages for each in page_ranges(table))
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        assert [run.cold_pages for run in journal.cells["1"].runs] == [pages] * 6
    assert residents == [0, pages] * 12


def test_a_table_that_stays_in_memory_has_no_figures(bench: Bench, gguf_path: Path) -> None:
    plan = bench.plan(cold={"model": str(gguf_path)})
    with open(gguf_path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        sum(mapped[::4096])
        with bench.journal(plan) as journal:
            assert bench.run(plan, journal)
            assert "OS pages of the table stayed in memory" in str(journal.cells["1"].failed)
            assert str(gguf_path) in str(journal.cells["1"].failed)
    assert bench.order == []


def test_a_table_that_is_not_there(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan(cold={"model": str(tmp_path / "no.gguf")})
    with bench.journal(plan) as journal:
        assert bench.run(plan, journal)
        assert "no.gguf" in str(journal.cells["1"].failed)
