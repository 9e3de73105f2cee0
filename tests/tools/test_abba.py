"""Commands are compared, a measurement that was ended goes on, and what can't be compared is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lazyio.bench.abba.definition import plan_of
from lazyio.bench.abba.plan import ColdTable

TOOL = Path(__file__).resolve().parents[2] / "tools" / "abba.py"

RUNS = """
command = ["sh", "-c", '''echo {n} >> ran; echo '{"metrics": {"x": '{x}{n}'}, "tokens": "t", "logits": "{cell}"}' ''']
rounds = 2
[arms.on]
set = { n = 1 }
[arms.uring]
set = { n = 2 }
[cells.2k]
set = { x = 2, cell = "p" }
[cells.8k]
set = { x = 8, cell = "q" }
[metrics.x]
better = "%s"
"""

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loading = importlib.util.spec_from_file_location("abba", TOOL)
    assert loading is not None
    assert loading.loader is not None
    loaded = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def run(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program in an empty folder, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return lambda *arguments: CliRunner().invoke(tool.app, [str(argument) for argument in arguments])


def ran() -> list[str]:
    return Path("ran").read_text().split() if Path("ran").exists() else []


def test_a_definition_from_start_to_end(run: Run) -> None:
    Path("runs.toml").write_text(RUNS % "higher")
    done = run("runs.toml", "--json", "out.json")
    assert done.exit_code == 0, done.output
    assert ran() == ["1", "2", "1", "1", "2", "1"] * 2
    assert "2k: 2 rounds" in done.stdout
    assert "No arm is slower beyond its noise in 2 of 2 cells" in done.stdout
    assert "8k, round 2 of 2: uring x 82" in done.stderr
    document = json.loads(Path("out.json").read_text())
    assert document["accepted"] is True
    assert document["cells"][0]["metrics"]["x"]["arms"][1]["verdict"] == "faster"
    # What is there is not measured again, and can be had again.
    assert run("runs.toml", "--json", "other.json").stdout == done.stdout
    assert json.loads(Path("other.json").read_text()) == document
    assert len(ran()) == 12
    assert run("runs.toml", "--again", "8k").exit_code == 0
    assert len(ran()) == 18


def test_the_definition_of_the_docs() -> None:
    example, cold = re.findall(r"```toml\n(.*?)```", (TOOL.parents[1] / "docs/abba.md").read_text(), re.DOTALL)
    plan = plan_of(tomllib.loads(example + cold))
    assert (plan.cells, plan.arms, plan.reference) == (["2k", "8k"], ["on", "uring"], "on")
    job = plan.jobs["8k"]["uring"]
    assert " ".join(job.command).startswith("lazyio bench-engine model.gguf --prompts 8192 --modes uring --lookahead 2")
    assert job.env == {"OMP_NUM_THREADS": "4", "LAZYIO_QUEUE_DEPTH": "1024"}
    assert job.cold == ColdTable("model.gguf", None)


def test_an_arm_that_is_slower(run: Run) -> None:
    Path("runs.toml").write_text(RUNS % "lower")
    done = run("runs.toml")
    assert done.exit_code == 1
    assert "SLOWER beyond the noise: uring in 2k, x: 0.955 ±0.000." in done.stdout


def test_outputs_that_differ(run: Run) -> None:
    Path("runs.toml").write_text(RUNS.replace('"{cell}"', '"{cell}{n}"') % "higher")
    done = run("runs.toml")
    assert done.exit_code == 1
    assert ran() == ["1", "2"] * 2
    assert "2k: VOID, its outputs differ: logits is p1 of on and p2 of uring." in done.stdout


def test_a_changed_definition(run: Run) -> None:
    Path("runs.toml").write_text(RUNS % "higher")
    assert run("runs.toml").exit_code == 0
    state = Path("runs.state.jsonl").read_bytes()
    Path("runs.toml").write_text(RUNS.replace("rounds = 2", "rounds = 4") % "higher")
    refused = run("runs.toml")
    assert refused.exit_code == 2
    assert (
        "abba: error: runs.state.jsonl has the figures of another definition: rounds was 2 and is 4" in refused.stderr
    )
    assert Path("runs.state.jsonl").read_bytes() == state
    assert run("runs.toml", "--state", "other.jsonl").exit_code == 0


def test_a_budget(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs.toml").write_text(RUNS % "higher")
    refused = run("runs.toml", "--budget-s", 0)
    assert refused.exit_code == 2
    assert "--budget-s 0 does not hold one round of cell 2k" in refused.stderr
    assert ran() == []
    monkeypatch.setattr("lazyio.bench.abba.session.GRACE_S", 0.0)
    hang = '[ "$(wc -l < ran)" -le 6 ] || sleep 60; echo'
    Path("slow.toml").write_text(RUNS.replace("ran; echo", f"ran; {hang}", 1) % "higher")
    ended = run("slow.toml", "--budget-s", 3)
    assert ended.exit_code == 3
    assert "the budget of 3 s ends: on had not ended; the same command goes on from here" in ended.stderr
    assert "2k: 2 rounds" in ended.stdout
    assert "1 of 2 cells are not complete, and not judged." in ended.stdout


def inline(*more: str) -> tuple[str, ...]:
    command = """sh -c 'echo {n}{c} >> ran; echo "{\\"v\\": [{n}, {n}]}" > {out}'"""
    given = ("--state", "s.jsonl", "--rounds", "2", "--equal", "", "--command", command)
    return (*given, "--arm", "on: n=1", "--arm", "uring: n=2", "--cell", "x: c=5", "--cell", "y: c='6 7'", *more)


def test_a_definition_in_options(run: Run) -> None:
    done = run(*inline("--metric", "v: higher v.*"))
    assert done.exit_code == 0, done.output
    assert ran() == [
        "15",
        "25",
        "15",
        "15",
        "25",
        "15",
        *["16", "7", "26", "7", "16", "7"],
        *["16", "7", "26", "7", "16", "7"],
    ]
    assert "v       on" in done.stdout
    assert "Outputs: NOT COMPARED" in done.stdout
    assert run(*inline("--metric", "v: lower v.0", "--state", "t.jsonl")).exit_code == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--arm", "on: n=3"), "--arm is 'on: n=3'; it should be a name, other than those before, a colon and more"),
        (("--arm", "off"), "--arm is 'off'; it should be a name"),
        (("--arm", "off: n"), "--arm 'off: n' should have KEY=VALUE after the colon"),
        (("--arm", "off: n='1"), '--arm "off: n=\'1": No closing quotation'),
        (("--metric", "v:"), "--metric 'v:' should have lower or higher after the colon"),
        (("--metric", "v: less"), "metrics.v.better is 'less'"),
        (("--again", "z"), "there is no cell 'z' to measure again; there are x, y"),
        (("--rounds", "3"), "rounds is 3"),
        (
            ("runs.toml",),
            "there can't be another command, arms, cells, equal, rounds",
        ),
    ],
)
def test_options_that_make_no_sense(run: Run, more: tuple[str, ...], told: str) -> None:
    refused = run(*inline(*more))
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert ran() == []


def test_files_that_cannot_be_used(run: Run) -> None:
    assert "can't read or write missing.toml: No such file" in run("missing.toml").stderr
    Path("bad.toml").write_text("rounds = = 2")
    assert "bad.toml is not TOML" in run("bad.toml").stderr
    Path("bad.toml").write_bytes(b"\xff")
    assert "bad.toml is not TOML" in run("bad.toml").stderr
    assert "give --state FILE" in run("--arm", "a: x=1", "--arm", "b: x=2", "--command", "y {x}").stderr
    Path("runs.toml").write_text(RUNS % "higher")
    assert "is no state of a comparison" in run("runs.toml", "--state", "runs.toml").stderr
    assert "can't read or write no/s.jsonl" in run("runs.toml", "--state", "no/s.jsonl").stderr
    assert ran() == []
    done = run("runs.toml", "--json", "no/out.json")
    assert done.exit_code == 2
    assert "can't read or write no/" in done.stderr
    assert "2k: 2 rounds" in done.stdout
    assert run("runs.toml").exit_code == 0
    assert len(ran()) == 12


def started(folder: Path) -> subprocess.Popen[str]:
    """The program, in its eighth run: that one hangs while there is no file `go`."""
    hang = '[ -e go ] || [ "$(wc -l < ran)" -ne 8 ] || sleep 60; echo'
    (folder / "runs.toml").write_text(RUNS.replace("ran; echo", f"ran; {hang}", 1) % "higher")
    command = [sys.executable, str(TOOL), "runs.toml"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("8k, round 1 of 2: on"):
            return process
    raise AssertionError("it never came to the second cell")


def test_a_measurement_that_is_ended_goes_on(run: Run, tmp_path: Path) -> None:
    process = started(tmp_path)
    while len(ran()) < 8:
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint.endswith("abba: interrupted; what was measured is kept, and the same command goes on from there\n")
    Path("go").touch()
    done = run("runs.toml")
    assert done.exit_code == 0, done.output
    assert ran()[8:] == ["1", "2", "1", "1", "2", "1"]


def test_a_measurement_that_is_killed_goes_on_when_its_command_is_gone(run: Run, tmp_path: Path) -> None:
    process = started(tmp_path)
    while len(ran()) < 8:
        os.sched_yield()
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    process.kill()
    process.communicate(timeout=60)
    try:
        refused = run("runs.toml")
        assert refused.exit_code == 2
        assert "is in use: by another measurement, or by a command that one which was killed has left" in refused.stderr
    finally:
        for child in children:
            os.killpg(int(child), signal.SIGKILL)
    Path("go").touch()
    done = run("runs.toml")
    assert done.exit_code == 0, done.output
    assert ran()[8:] == ["1", "2", "1", "1", "2", "1"]
