from __future__ import annotations

import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lazyio import SettingError
from lazyio.bench.headline.work import Subject, Work, check_unchanged, locked

SUBJECT = Subject("tiny", "F8_E4M3", 4000, 4, "cpu", "on-bare,uring", "0,2", None)
STEP = {"subject": "", "prompts": [{"rounds": [[], []]}]}


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path, tmp_path / "model", tmp_path / "results", [10, 20], 2, 60, math.inf, math.inf, -1)


def test_what_is_kept_is_not_missing(work: Work) -> None:
    assert work.before() == {}
    assert work.missing() == [(10, 1), (20, 1), (10, 2), (20, 2)]
    work.keep(10, 2, SUBJECT, STEP, 1.5)
    assert work.missing() == [(10, 1), (20, 1), (20, 2)]
    assert [step["took_s"] for step in work.measured(10)] == [1.5]
    assert work.before() == SUBJECT.as_json()


def test_another_subject_is_refused_with_what_changed(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    check_unchanged(work.results, work.before(), SUBJECT)
    work.keep(10, 1, SUBJECT, STEP, 1.5)
    check_unchanged(work.results, work.before(), SUBJECT)
    with pytest.raises(
        SettingError, match=r"something else: layers was 4 and is 3; undo that, or give another RESULTS"
    ):
        check_unchanged(work.results, work.before(), replace(SUBJECT, layers=3))
    monkeypatch.setenv("LAZYIO_UBATCH", "16")
    with pytest.raises(SettingError, match=r"environment.LAZYIO_UBATCH was not there and is '16'"):
        check_unchanged(work.results, work.before(), SUBJECT)


@pytest.mark.parametrize("text", ["", "[1]", '{"prompts": []}', '{"asked": {}, "took_s": 1'])
def test_a_damaged_step_is_named(work: Work, text: str) -> None:
    work.results.mkdir()
    work.file_of(10, 1).write_text(text)
    with pytest.raises(SettingError, match=r"10-1.json is no step of a measurement, or is damaged; remove it"):
        work.measured(10)
    with pytest.raises(SettingError, match=r"10-1.json"):
        work.before()


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with locked(folder), pytest.raises(SettingError, match="is in use: by another measurement"), locked(folder):
        pass
    with locked(folder) as lock:
        left = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    with pytest.raises(SettingError, match="a command that one which was killed has left running"), locked(folder):
        pass
    left.kill()
    left.wait()
    with locked(folder):
        pass
