"""A comparison that is stopped in the middle: what was measured is printed, and in its file."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from lazyio import RunsDifferError
from lazyio.cli import app
from lazyio.engine.bench.rig import Rig

FEW = ["--decode", "3", "--context", "5", "--rounds", "3", "--ubatch", "8", "--device", "cpu", "--modes", "uring"]
# What is asked for, and where in the file it is. A round has three runs: off, uring and off again.
PARTS = {
    "prompts": ["--prompts", "20", "--decode", "0"],
    "decode": ["--prompts", ""],
    "streams": ["--prompts", "", "--streams", "2"],
    "queue": ["--prompts", "", "--queued", "2"],
}

Stop = Callable[[], None]


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("qwen4_exp", ple_embed_dim=256).reference.save_pretrained(path)
    return path


@pytest.fixture
def stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str], int, Stop], tuple[Result, dict[str, Any], dict[str, Any]]]:
    """Runs a command that something stops in its nth run, the first of which is no measured one.

    What it printed, and its file as it was before that and as it is at last.
    """

    def run(options: list[str], runs: int, stop: Stop) -> tuple[Result, dict[str, Any], dict[str, Any]]:
        out, calls, checked, before = tmp_path / "out.json", count(1), Rig.checked, list[str]()

        def noted(rig: Rig, what: str, label: str, logits: Sequence[torch.Tensor]) -> str:
            if next(calls) == runs:
                before.append(out.read_text())
                stop()
            return checked(rig, what, label, logits)

        monkeypatch.setattr(Rig, "checked", noted)
        # A device that changes would have rounds run again.
        monkeypatch.setattr("lazyio.engine.bench.prompts.STEADY_WITHIN", 1e9)
        result = CliRunner().invoke(app, ["bench-engine", str(folder), *FEW, *options, "--json", str(out)])
        assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
        return result, json.loads(before[0]), json.loads(out.read_text())

    return run


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def differ() -> None:
    raise RunsDifferError("void")


def part_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document[name]
    return found[0] if isinstance(found, list) else found  # type: ignore[no-any-return]


def rounds_of(result: Result) -> list[tuple[str, int]]:
    """Of each row of the table its mode, marked where it is the second run, and the number in its next cell."""
    rows = re.findall(r"^ (?:2, )?(off|uring)(?: \+\d)?( \(again\))? +(\d+) ", result.stdout, re.MULTILINE)
    return [(f"{mode}{again}", int(rounds)) for mode, again, rounds in rows]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("stop", "status"), [(interrupt, 130), (terminate, 143)])
def test_what_was_measured_is_kept_and_shown(stopped: Any, part: str, stop: Stop, status: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    result, kept, last = stopped([*PARTS[part], "--lookahead", "0"], 1 + 3 + 2, stop)
    assert result.exit_code == status
    assert signal.getsignal(signal.SIGTERM) is before
    assert not kept["complete"]
    assert kept == last  # written after each run, and not for the interrupt alone
    assert len(part_of(last, part)["rounds"]) == 1
    (unfinished,) = part_of(last, part)["unfinished"]
    assert unfinished["again"]  # the second round goes backwards
    assert re.search(r"mode.* rounds ", result.stdout)
    assert rounds_of(result) == [("off", 1), ("uring", 1), ("off (again)", 2)]
    assert "Stopped before the end: " in result.stdout
    assert "Logits: equal" in result.stdout


def test_ratios_are_of_runs_in_the_same_round(stopped: Any) -> None:
    """Stopped in the second one, which goes backwards, before the run that others are over."""
    result, _, last = stopped([*PARTS["prompts"], "--lookahead", "0"], 1 + 3 + 3, interrupt)
    assert rounds_of(result) == [("off", 1), ("uring", 2), ("off (again)", 2)]
    again, uring = last["prompts"][0]["unfinished"]
    assert again["floor_s"] == pytest.approx(sum(again["run"]["computes_s"]))
    assert uring["floor_s"] > 0
    (row,) = (line for line in result.stdout.splitlines() if line.startswith(" uring"))
    assert row.count("[") == 2  # T, and T over T*: of T over that of off there is one


def test_a_part_whose_runs_differ_is_void(stopped: Any) -> None:
    options = ["--prompts", "20", "--streams", "2", "--lookahead", "0"]
    result, kept, last = stopped(options, 1 + 9 + 1 + 3, differ)
    assert result.exit_code == 2
    assert len(kept["streams"]["unfinished"]) == 2
    assert last["streams"] is None
    assert not last["complete"]
    assert len(last["prompts"][0]["rounds"]) == 3
    assert "prompt of 20 tokens" in result.stdout
    assert "decode of several streams" not in result.stdout


def test_a_complete_one_says_so(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["bench-engine", str(folder), *FEW, "--rounds", "1", "--json", str(out), "--prompts", ""]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["complete"]
    assert "Stopped" not in result.stdout
    assert " rounds " not in result.stdout


def test_what_is_said_while_it_goes_on(folder: Path) -> None:
    options = ["bench-engine", str(folder), *FEW, "--rounds", "1", "--prompts", ""]
    result = CliRunner().invoke(app, [*options, "--streams", "2", "--queued", "2", "--lookahead", "0"])
    assert result.exit_code == 0, result.output
    number = r"[\d,.]+"
    said = (
        rf"streams: 2, uring: {number} tokens/s, step {number} us, waited {number} us, scheduler {number} us, "
        rf"{number} % of a step\n"
    )
    assert len(re.findall(said, result.stderr)) == 1
    said = (
        rf"2 queued, uring \+0: first in the queue {number} s, the queued waited {number} ms each, "
        rf"{number} ms at most, who had no queue {number} ms\n"
    )
    assert len(re.findall(said, result.stderr)) == 1
