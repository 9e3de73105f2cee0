from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner, Result

TOOL = Path(__file__).resolve().parents[2] / "tools" / "soak.py"

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


@pytest.fixture
def run(tool: ModuleType, tmp_path: Path) -> Run:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(tool.app, ["--folder", str(tmp_path), *map(str, arguments)])

    return invoke


def test_ten_seconds_with_faults_as_others_run_it(tmp_path: Path) -> None:
    command = [sys.executable, TOOL, "--minutes", str(1 / 6), "--faults", "0.01", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "0 wrong bytes" in last
    assert int(re.search(r"([\d,]+) reads resumed", last)[1].replace(",", "")) > 100
    assert done.stderr == ""
    assert os.listdir(tmp_path) == []


def test_it_ends_when_the_rows_are_compared(run: Run) -> None:
    done = run("--rows", 1)
    assert done.exit_code == 0, done.output
    assert "of 1 tables, 0 reads resumed, 0 gathers repeated" in done.stdout


def test_a_wrong_byte_is_found(run: Run, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tool.expected_rows

    def wrong(ids: np.ndarray) -> np.ndarray:
        rows = right(ids)
        rows[::50, 7] ^= 1
        return rows

    monkeypatch.setattr(tool, "expected_rows", wrong)
    done = run("--rows", 100_000)
    assert done.exit_code == 1
    assert re.search(r"FAILED: (\d+ of \d+ rows are wrong, the first of them row \d+|a forked child)", done.stderr)
    assert "WRONG BYTES" in done.stdout


@pytest.mark.parametrize("what", ["descriptors", "threads", "memory"])
def test_what_grows_is_named(run: Run, tool: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    kept: list[object] = []
    done_with = threading.Event()

    def leak(soak: object, table: object) -> None:
        if what == "descriptors":
            kept.append(open(os.devnull))  # noqa: SIM115 - a leak is wanted
        elif what == "threads":
            thread = threading.Thread(target=done_with.wait)
            thread.start()
            kept.append(thread)
        else:
            kept.append(np.ones(4 << 20, np.uint8))
        soak.tally.rows += 1

    use = tool.Soak.__init__

    def leaking(soak: object, *arguments: object) -> None:
        use(soak, *arguments)
        soak._uses = (soak._few, lambda table: leak(soak, table))

    monkeypatch.setattr(tool.Soak, "__init__", leaking)
    monkeypatch.setattr(tool, "_TOLERATED_BYTES", 4 << 20)
    try:
        done = run("--rows", 12_000)
    finally:
        done_with.set()
        for each in kept:
            if isinstance(each, threading.Thread):
                each.join()
            elif not isinstance(each, np.ndarray):
                each.close()
    assert done.exit_code == 1, done.output
    assert f"FAILED: {what} grew from" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--faults", "2"], "--faults"),
        (["--minutes", "-1"], "--minutes"),
        (["--folder", "/nowhere/at/all"], "there is no folder /nowhere/at/all: make it"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
