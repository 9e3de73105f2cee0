from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyio.bench.abba import process
from lazyio.bench.abba.plan import OUT_FILE
from lazyio.bench.abba.process import Answer, ask, do
from lazyio.errors import RunFailed


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "kept", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield descriptor
    os.close(descriptor)


def shell(text: str, keep: int, timeout_s: float | None = 20.0, **env: str) -> Answer:
    return ask(("sh", "-c", text, "sh", OUT_FILE), env, timeout_s, keep)


@pytest.mark.parametrize(
    "text",
    [
        "echo '{\"x\": 1}'",
        "echo '{'; echo '\"x\": 1}'",
        "echo loading; echo '{\"x\": 2}'; echo ' {\"x\": 1}'; echo '[1]'; echo done; echo '{no'",
        'echo \'{"x": 1}\' > "$ABBA_OUT"; echo \'{"x": 2}\'',
        'echo \'{"x": 1}\' > "$1"',
        'echo "{\\"x\\": $NUMBER}"',
    ],
)
def test_the_document_of_a_command(text: str, keep: int) -> None:
    answer = shell(text, keep, NUMBER="1")
    assert answer.document == {"x": 1}
    assert 0 < answer.wall_s < 20


def test_the_time_is_that_of_the_process(keep: int) -> None:
    assert 0.1 <= shell("sleep 0.1; echo '{}'", keep).wall_s < 15


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo hello", "gave no JSON object, neither on its output.*ABBA_OUT names; it said last:\nhello"),
        ("true", "gave no JSON object.*; it said nothing"),
        ("echo '[1]'", "gave no JSON object"),
        ('echo x > "$ABBA_OUT"; echo "{}"', "gave no JSON object"),
        ("echo '{}'; echo no such model >&2; exit 3", "ended with status 3; it said last:\nno such model"),
        ("echo '{}'; kill -9 $$", r"ended by signal 9 \(Killed\); it said last:\n{}"),
    ],
)
def test_what_gives_no_document(text: str, told: str, keep: int) -> None:
    with pytest.raises(RunFailed, match=told):
        shell(text, keep)


def test_only_the_end_of_a_long_complaint_is_told(keep: int) -> None:
    with pytest.raises(RunFailed) as failed:
        shell("seq 100000 >&2; exit 1", keep)
    assert str(failed.value).endswith("\n99999\n100000")
    assert len(str(failed.value)) < 2500


def test_a_command_that_is_not_there(keep: int) -> None:
    with pytest.raises(RunFailed, match="can't run `no-such-command x`: No such file"):
        ask(("no-such-command", "x"), {}, None, keep)


def test_a_command_without_an_end(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 10.0)
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"took longer than 0\.1 s and was ended; it said last:\nbegun"):
        shell("echo begun; sleep 60", keep, 0.1)
    assert time.monotonic() - start < 10


def test_a_command_that_does_not_want_to_end(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    with pytest.raises(RunFailed, match="took longer than"):
        shell("trap '' TERM; while true; do sleep 60; done", keep, 0.1)


def ended(pid: int) -> bool:
    """Gone, or waiting to be collected by whoever collects orphans."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        os.sched_yield()
    return False


def test_nothing_is_left_running(keep: int) -> None:
    answer = shell('sleep 600 & echo "{\\"pid\\": $!}"', keep)
    assert ended(answer.document["pid"])


def test_an_interrupt_ends_the_command(keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "pid"

    def interrupted(self: object, timeout_s: float | None) -> bool:
        while not told.exists() or not told.read_text():
            os.sched_yield()
        raise KeyboardInterrupt

    monkeypatch.setattr(process._Child, "ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shell(f"echo $$ > {told}; sleep 600", keep)
    assert ended(int(told.read_text()))


def test_a_command_inherits_what_is_kept_and_a_terminal_s_signals_do_not_reach_it(keep: int) -> None:
    answer = shell(f'echo "{{\\"pid\\": $$, \\"kept\\": \\"$(readlink /proc/$$/fd/{keep})\\"}}"', keep)
    assert answer.document["kept"].endswith("/kept")
    assert subprocess.os.getpgrp() != answer.document["pid"]


def test_output_of_no_interest(keep: int, tmp_path: Path) -> None:
    do(("sh", "-c", 'echo not JSON; echo "$A" > "$1"', "sh", str(tmp_path / "made")), {"A": "b"}, 20.0, keep)
    assert (tmp_path / "made").read_text() == "b\n"
    with pytest.raises(RunFailed, match="status 1; it said last:\nwhy"):
        do(("sh", "-c", "echo why; exit 1"), {}, 20.0, keep)


def test_a_document_that_is_too_long(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LONGEST_BYTES", 10)
    with pytest.raises(RunFailed, match="a document of 13 bytes is longer than the 10"):
        shell('echo \'{"x": 12345}\' | tr -d \'5\' > "$ABBA_OUT"; echo >> "$ABBA_OUT"', keep)
