from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyio.bench.abba.journal import Journal, Run
from lazyio.bench.abba.plan import Plan
from lazyio.errors import SettingError

MakePlan = Callable[..., Plan]
MakeRun = Callable[..., Run]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.jsonl"


@pytest.fixture
def plan(make_plan: MakePlan) -> dict[str, Any]:
    return make_plan(cells={"2k": {}, "8k": {}}).as_json()


@pytest.fixture
def turns(make_run: MakeRun) -> list[Run]:
    return [make_run("a", 1.5), make_run("b", 2.5), make_run("a", 1.25, again=True)]


def test_what_was_noted_is_there_again(path: Path, plan: dict[str, Any], turns: list[Run]) -> None:
    with Journal(path, plan) as journal:
        journal.begin({"cpu": "x"}, "now")
        journal.add_round("2k", turns)
        journal.add_void("8k", "differ")
        assert journal.cells["2k"].rounds == [turns]
    with Journal(path, plan) as journal:
        assert journal.cells["2k"].rounds == [turns]
        assert journal.cells["2k"].runs == turns
        assert journal.cells["8k"].void == "differ"
        journal.begin({"cpu": "y"}, "later")
        journal.add_round("2k", turns[::-1])
    with Journal(path, plan) as journal:
        assert journal.cells["2k"].rounds == [turns, turns[::-1]]
        assert journal.cells["2k"].sittings == [0, 1]
        assert journal.sittings == [{"cpu": "x"}, {"cpu": "y"}]


def test_what_failed_is_tried_again_in_another_sitting(path: Path, plan: dict[str, Any], turns: list[Run]) -> None:
    with Journal(path, plan) as journal:
        journal.begin({}, "now")
        journal.add_round("2k", turns)
        journal.add_failed("2k", "status 1")
    with Journal(path, plan) as journal:
        assert journal.cells["2k"].failed == "status 1"
        journal.begin({}, "later")
        assert journal.cells["2k"].failed is None
        assert journal.cells["2k"].rounds == [turns]


def test_a_cell_from_its_start(path: Path, plan: dict[str, Any], turns: list[Run]) -> None:
    with Journal(path, plan) as journal:
        journal.begin({}, "now")
        journal.add_round("2k", turns)
        journal.add_round("8k", turns)
        journal.add_void("2k", "differ")
        journal.again("2k")
        assert journal.cells["2k"].rounds == []
        with pytest.raises(SettingError, match="there is no cell '4k' to measure again; there are 2k, 8k"):
            journal.again("4k")
    with Journal(path, plan) as journal:
        assert (journal.cells["2k"].rounds, journal.cells["2k"].void) == ([], None)
        assert journal.cells["8k"].rounds == [turns]


def test_any_sudden_end_loses_the_last_line_at_most(path: Path, plan: dict[str, Any], turns: list[Run]) -> None:
    with Journal(path, plan) as journal:
        journal.begin({}, "now")
        journal.add_round("2k", turns)
        before = path.stat().st_size
        journal.add_round("2k", turns)
    content = path.read_bytes()
    for end in (0, 1, 30, before // 2, before - 1, before, before + 1, len(content) - 1, len(content)):
        path.write_bytes(content[:end])
        with Journal(path, plan) as journal:
            rounds = journal.cells["2k"].rounds
            whole = content[:end].rpartition(b"\n")[0]
            assert rounds == [turns] * whole.count(b'"event": "round"')
            journal.add_round("8k", turns)
        with Journal(path, plan) as journal:
            assert journal.cells["8k"].rounds == [turns]
            assert journal.cells["2k"].rounds == rounds


def test_another_definition_is_refused(path: Path, plan: dict[str, Any], make_plan: MakePlan) -> None:
    Journal(path, plan).__exit__(None, None, None)
    content = path.read_bytes()
    other = make_plan(cells={"2k": {}, "8k": {}}, rounds=4, env={"A": 1}).as_json()
    with pytest.raises(
        SettingError,
        match=r"another definition: rounds was 2 and is 4; cells\.2k\.a\.env\.A was not there and is '1'; .*; undo",
    ):
        Journal(path, other)
    with pytest.raises(SettingError, match=r"cells\.9k\.a\.command was not there and is .*; and \d+ more; undo"):
        Journal(path, make_plan(cells={f"{number}k": {} for number in range(10, 1, -1)}).as_json())
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"notes of mine", b"{}\n", b'{"event": "round"}\n', b"\n"])
def test_other_files_are_left_alone(path: Path, plan: dict[str, Any], content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SettingError, match="is no state of a comparison, and is left as it is"):
        Journal(path, plan)
    assert path.read_bytes() == content


def test_damage_in_the_middle(path: Path, plan: dict[str, Any], turns: list[Run]) -> None:
    with Journal(path, plan) as journal:
        journal.begin({}, "now")
        journal.add_round("2k", turns)
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"event": \n' + b"".join(others))
    with pytest.raises(SettingError, match="is damaged"):
        Journal(path, plan)


def test_another_format(path: Path, plan: dict[str, Any]) -> None:
    path.write_text(json.dumps({"event": "plan", "format": 99, "plan": plan}) + "\n")
    with pytest.raises(SettingError, match="is of format 99, not 1"):
        Journal(path, plan)


def test_one_at_a_time(path: Path, plan: dict[str, Any]) -> None:
    with Journal(path, plan) as journal:
        with pytest.raises(SettingError, match="is in use"):
            Journal(path, plan)
        left = subprocess.Popen(["sleep", "600"], pass_fds=[journal.lock])
    try:
        # What a killed measurement has left running still measures.
        with pytest.raises(SettingError, match="a command that one which was killed has left running"):
            Journal(path, plan)
    finally:
        left.kill()
        left.wait()
    Journal(path, plan).__exit__(None, None, None)


@pytest.mark.parametrize("landed", [0, 1, 40])
def test_a_full_disk_leaves_the_file_as_it_was(
    path: Path, plan: dict[str, Any], turns: list[Run], monkeypatch: pytest.MonkeyPatch, landed: int
) -> None:
    with Journal(path, plan) as journal:
        journal.begin({}, "now")
        journal.add_round("2k", turns)
        content = path.read_bytes()
        write, room = os.write, landed

        def full(descriptor: int, data: bytes) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(descriptor, data[:room])
            room -= written
            return written

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left on device; what was measured before is kept") as failed:
            journal.add_round("2k", turns)
        monkeypatch.undo()
        assert failed.value.filename == str(path)
        assert path.read_bytes() == content
        assert journal.cells["2k"].rounds == [turns]
        journal.add_round("2k", turns)
    with Journal(path, plan) as journal:
        assert journal.cells["2k"].rounds == [turns] * 2
