"""Budgets and refusals, with commands that do nothing; tests/tools/test_headline.py runs the real ones."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from lazyio import NeverFits, SettingError
from lazyio.bench.headline import room, steps
from lazyio.bench.headline.steps import make, measure
from lazyio.bench.headline.work import Subject, Work
from lazyio.errors import RunFailed

SUBJECT = Subject("tiny", "F8_E4M3", 4000, 4, "cpu", "on-bare,uring", "0,2", "/ids.npy")


MEASURED = {"subject": "", "prompts": [{"rounds": [[], []]}]}
HALF = {"subject": "", "prompts": [{"rounds": [[]]}]}


def out_of(command: Sequence[str]) -> Path:
    return Path(command[command.index("--json") + 1])


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "maker", tmp_path / "model", tmp_path / "results", [10, 20], 2, 60, math.inf, math.inf, -1)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], float | None]]:
    """Commands and their limits; each takes no time."""
    commands: list[tuple[list[str], float | None]] = []

    def do(command: Sequence[str], env: Mapping[str, str], timeout_s: float | None, keep: int) -> None:
        commands.append((list(command), timeout_s))
        out_of(command).write_text(json.dumps(MEASURED))

    monkeypatch.setattr(steps, "do", do)
    return commands


def budget(work: Work, left_s: float) -> Work:
    return replace(work, budget_s=left_s, ends=time.monotonic() + left_s)


def test_the_type_of_weights_is_handed_on(work: Work, asked: list, said: list[str]) -> None:
    measure(work, replace(SUBJECT, trunk="Q4_0"), False, said.append)
    assert all(command[command.index("--trunk") + 1] == "Q4_0" for command, _ in asked)


def test_what_is_missing_is_measured_once(work: Work, asked: list, said: list[str]) -> None:
    work.keep(10, 1, SUBJECT, MEASURED, 1.0)
    assert measure(work, SUBJECT, False, said.append)
    assert [command[command.index("--prompts") + 1] for command, _ in asked] == ["20", "10", "20"]
    words = " ".join(asked[0][0])
    for part in ("--rounds 2", "--cold", "--strict", "--modes on-bare,uring", "--layers 4", "--ids /ids.npy"):
        assert part in words
    assert "--trunk" not in words
    assert asked[0][1] == 60
    assert said[-1] == "20 tokens, step 2 of 2: measured"
    assert work.missing() == []


def test_a_step_that_would_end_later_is_not_begun(work: Work, asked: list, said: list[str]) -> None:
    work.keep(20, 1, SUBJECT, MEASURED, 40.0)
    assert not measure(budget(work, 30), SUBJECT, False, said.append)
    assert work.missing() == [(20, 2)]
    assert all(limit <= 30 for _, limit in asked)
    with pytest.raises(SettingError, match="BUDGET_S is 30, too little for a step of 20 tokens: raise it"):
        measure(budget(work, 30), SUBJECT, False, said.append)
    assert not measure(budget(work, 30), SUBJECT, True, said.append)  # the table was made


def ending(monkeypatch: pytest.MonkeyPatch, *documents: object) -> None:
    """Each step takes longer than it may, and leaves the next of the documents, if there is one."""
    left = list(documents)

    def too_long(command: Sequence[str], _env: object, timeout_s: float, _keep: int) -> None:
        if left:
            out_of(command).write_text(json.dumps(left.pop(0)))
        Event().wait(timeout_s + 0.01 if timeout_s < 1 else 0)
        raise RunFailed("took too long")

    monkeypatch.setattr(steps, "do", too_long)


def test_a_step_that_the_budget_ends_is_no_failure(
    work: Work, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending(monkeypatch)
    assert not measure(budget(work, 0.05), SUBJECT, True, said.append)
    assert len(work.missing()) == 4
    with pytest.raises(SettingError, match="too little for a step of 10 tokens"):
        measure(budget(work, 0.05), SUBJECT, False, said.append)
    with pytest.raises(RunFailed):
        measure(work, SUBJECT, True, said.append)


def test_complete_rounds_of_a_step_that_was_ended_are_kept(
    work: Work, asked: list, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work.keep(10, 1, SUBJECT, MEASURED, 0.01)
    with monkeypatch.context() as patched:
        ending(patched, HALF)
        assert not measure(budget(work, 0.05), SUBJECT, False, said.append)
        assert said == ["20 tokens, step 1 of 2: the budget ended it after 1 of 2 rounds"]
        (kept,) = work.measured(20)
        assert kept["prompts"] == HALF["prompts"]
        assert kept["asked"] == SUBJECT.as_json()
        # What is no more than that takes nothing away.
        ending(patched, {"subject": "", "prompts": []})
        assert not measure(budget(work, 0.2), SUBJECT, True, said.append)
        assert work.measured(20) == [kept]
    assert work.missing() == [(20, 1), (10, 2), (20, 2)]
    assert measure(work, SUBJECT, False, said.append)
    assert [command[command.index("--prompts") + 1] for command, _ in asked] == ["20", "10", "20"]
    assert [len(step["prompts"][0]["rounds"]) for step in work.measured(20)] == [2, 2]
    assert {path.suffix for path in work.results.iterdir()} == {".json"}


def test_what_fits_is_measured_though_something_else_does_not(work: Work, asked: list, said: list[str]) -> None:
    for step in (1, 2):
        work.keep(20, step, SUBJECT, HALF, 40.0)
    assert not measure(budget(work, 30), SUBJECT, False, said.append)
    assert work.missing() == [(20, 1), (20, 2)]


def test_an_interrupt_keeps_the_complete_rounds(work: Work, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: Sequence[str], *_: object) -> None:
        out_of(command).write_text(json.dumps(HALF))
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "do", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(work, SUBJECT, False, said.append)
    assert [len(step["prompts"][0]["rounds"]) for step in work.measured(10)] == [1]


def test_what_a_killed_one_left_is_of_no_other(work: Work, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    work.results.mkdir()
    work.partial_of(10, 1).write_text(json.dumps(MEASURED))
    ending(monkeypatch)
    assert not measure(budget(work, 0.05), SUBJECT, True, said.append)
    assert work.measured(10) == []


def test_a_table_is_made_whole_or_not_at_all(work: Work, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (work.model.with_name("model.partial")).mkdir()  # what a killed one left

    def fail(command: Sequence[str], *_: object) -> None:
        Path(command[2]).mkdir()
        raise RunFailed("killed")

    monkeypatch.setattr(steps, "do", fail)
    with pytest.raises(RunFailed):
        make(work, SUBJECT, 1000, said.append)
    assert list(work.model.parent.iterdir()) == []
    monkeypatch.setattr(steps, "do", lambda command, *_: Path(command[2]).mkdir())
    assert make(work, SUBJECT, 1000, said.append)
    assert [path.name for path in work.model.parent.iterdir()] == ["model"]
    assert not make(work, SUBJECT, 1000, said.append)


def test_nothing_is_made_on_a_disk_too_small(work: Work, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "do", lambda *_: pytest.fail("nothing should be made"))
    monkeypatch.setattr(room, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(NeverFits, match="of disk are free"):
        make(work, SUBJECT, 1000, said.append)
    assert said == []
