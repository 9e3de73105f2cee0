"""A comparison that is stopped in the middle: what was measured is printed, and in its file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lazyio.bench.limit import DeviceLimit
from lazyio.bench.runs import Mark
from lazyio.cli import app
from lazyio.errors import NotCold

BENCH = ["--modes", "on-bare,uring", "--rounds", "3", "--tokens", "100", "--ubatch", "40", "--max-repeats", "0"]
PIPELINE = ["--pipeline", "--modes", "uring", "--compute-us-per-token", "1", "--rounds", "2", "--tokens", "100"]


@pytest.fixture
def stopped(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, Path]]:
    """A command that something stops when the device's limit is measured for the nth time, and its file."""

    def run(options: list[str], measurements: int, stop: Callable[[], None]) -> tuple[Result, Path]:
        out, calls, measure = tmp_path / "out.json", count(1), DeviceLimit.run

        def noted(limit: DeviceLimit) -> Mark:
            if next(calls) == measurements:
                stop()
            return measure(limit)

        monkeypatch.setattr(DeviceLimit, "run", noted)
        return CliRunner().invoke(app, ["bench", str(gguf_path), *options, "--json", str(out)]), out

    return run


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise NotCold("someone maps it")


def unfinished(out: Path) -> list[tuple[str, bool]]:
    document = json.loads(out.read_text())
    assert not document["complete"]
    return [(run["arm"], run["again"]) for run in document["unfinished"]]


@pytest.mark.parametrize(("stop", "status"), [(interrupt, 130), (terminate, 143)])
def test_complete_rounds_stand(stopped: Any, stop: Callable[[], None], status: int) -> None:
    result, out = stopped(BENCH, 4 + 3, stop)  # a round has three runs, and one measurement more
    assert result.exit_code == status, result.output
    assert "1 of 1 rounds" in result.stdout or "1 rounds, NONE" in result.stdout
    assert "Stopped before the end: cold, 1 of 3 rounds complete. The figures are of those" in result.stdout
    assert f"Results: {out}" in result.stdout
    assert unfinished(out) == [("uring", False)]
    assert len(json.loads(out.read_text())["runs"]) == 3


def test_a_broken_off_round_tells_where_there_is_no_other(stopped: Any) -> None:
    result, out = stopped(BENCH, 4, interrupt)
    assert result.exit_code == 130
    assert "of the one round, which was broken off" in result.stdout
    assert "Stopped before the end: cold, 0 of 3 rounds complete.\n" in result.stdout
    rows = [line.split()[0] for line in result.stdout.splitlines() if line.startswith((" on-bare", " uring"))]
    assert rows == ["on-bare"]
    assert unfinished(out) == [("uring", True), ("on-bare", False)]


def test_what_is_no_more_than_a_second_run_is_in_the_file_alone(stopped: Any) -> None:
    result, out = stopped(BENCH, 3, interrupt)
    assert result.exit_code == 130
    assert "cold: median" not in result.stdout
    assert unfinished(out) == [("uring", True)]


def test_before_the_first_run_there_is_nothing(stopped: Any) -> None:
    result, out = stopped(BENCH, 1, interrupt)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert not out.exists()


def test_what_goes_wrong_leaves_no_figure(stopped: Any) -> None:
    result, out = stopped(BENCH, 4 + 3, fail)
    assert result.exit_code == 2
    assert "Results: " not in result.stdout
    assert not out.exists()


def test_an_order_of_reading_and_computing(stopped: Any) -> None:
    result, out = stopped(PIPELINE, 1 + 2, interrupt)
    assert result.exit_code == 130, result.output
    assert "of 1 runs beside a steady device, stopped before the end" in " ".join(result.stdout.split())
    rows = [line for line in result.stdout.splitlines() if line.startswith((" gather", " lookahead"))]
    assert [row.split("  ")[0].strip() for row in rows] == ["gather, then compute"]
    document = json.loads(out.read_text())
    assert not document["complete"]
    assert len(document["runs"]) == 1
