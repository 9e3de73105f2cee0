"""The pipeline of reading and computing, measured on a small table."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lazyio import LazyTable, RunsDifferError, SettingError
from lazyio.bench.options import Request
from lazyio.bench.pipeline import FIXED, GATHER, PLANNED, WAYS, execute_pipeline
from lazyio.bench.pipeline_view import show_pipeline
from lazyio.cli import app


def request_of(path: Path, **asked: Any) -> Request:
    usual: dict[str, Any] = {
        "path": path,
        "pipeline": True,
        "compute_us_per_token": 10.0,
        "spin": True,
        "tokens": 300,
        "ubatch": 128,
        "rounds": 2,
        "modes": "on-direct",
        "limit_reads": 200,
    }
    return Request(**(usual | asked))


def test_every_way_runs_once_a_round_with_the_same_rows(gguf_path: Path, console: Console) -> None:
    outcome = execute_pipeline(request_of(gguf_path), console)
    assert [run.way for run in outcome.runs] == [GATHER, FIXED, PLANNED, PLANNED, FIXED, GATHER]
    assert [run.round for run in outcome.runs] == [0, 0, 0, 1, 1, 1]
    assert outcome.cuts[GATHER] == outcome.cuts[FIXED] == [128, 128, 44]
    assert sum(outcome.cuts[PLANNED]) == 300
    for run in outcome.runs:
        cuts = outcome.cuts[run.way]
        assert len(run.ready_s) == len(run.computed_s) == len(cuts)
        assert run.wall_s == run.computed_s[-1] >= 300 * 10e-6
        for tokens, ready_s, computed_s in zip(cuts, run.ready_s, run.computed_s, strict=True):
            assert computed_s - ready_s >= tokens * 10e-6
        assert run.over_greater_sum >= run.over_floor > 0
    assert outcome.backend == "pread"


def test_what_is_said_of_it(gguf_path: Path, console: Console) -> None:
    show_pipeline(execute_pipeline(request_of(gguf_path, rounds=1), console), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "median [lowest, highest]" in said
    assert all(way in said for way in WAYS)
    assert "10 us a token, simulated by a busy loop" in said
    assert all(len(line) <= 120 for line in said.split("Table: ")[0].splitlines())


def test_wrong_rows_make_it_void(gguf_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LazyTable.gather_unique

    def wrong(table: LazyTable, ids: Any) -> Any:
        rows, inverse = real(table, ids)
        return rows, inverse[::-1]

    monkeypatch.setattr(LazyTable, "gather_unique", wrong)
    with pytest.raises(RunsDifferError, match=GATHER):
        execute_pipeline(request_of(gguf_path), console)


def test_a_device_that_is_not_steady_does_not_count(gguf_path: Path, console: Console) -> None:
    outcome = execute_pipeline(request_of(gguf_path), console)
    first, second = (run for run in outcome.runs if run.way == PLANNED)
    object.__setattr__(first, "steady", False)
    object.__setattr__(second, "steady", True)
    assert outcome.counted(PLANNED) == [second]
    object.__setattr__(second, "steady", False)
    assert outcome.counted(PLANNED) == [first, second]


def test_the_command_leaves_results_and_a_picture(gguf_path: Path, tmp_path: Path) -> None:
    result, picture = tmp_path / "result.json", tmp_path / "picture.png"
    asked = ["--pipeline", "--compute-us-per-token", "10", "--spin", "--tokens", "200", "--rounds", "1"]
    where = ["--modes", "on-direct", "--limit-reads", "200", "--json", str(result), "--plot", str(picture)]
    done = CliRunner().invoke(app, ["bench", str(gguf_path), *asked, *where])
    assert done.exit_code == 0, done.output
    document = json.loads(result.read_text())
    assert {run["way"] for run in document["runs"]} == set(WAYS)
    assert document["compute_by"] == "spinning"
    assert 1000 < picture.stat().st_size < 100_000


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"compute_us_per_token": None}, "--pipeline needs --compute-us-per-token"),
        ({"compute_us_per_token": 0.0}, "--pipeline needs --compute-us-per-token"),
        ({"modes": "on,uring"}, "name one"),
        ({"warm": True}, "--pipeline and --warm contradict each other"),
        (
            {"decode": True, "tokens": None, "ubatch": None, "limit_reads": None},
            "--pipeline and --decode contradict each other",
        ),
        ({"pipeline": False, "spin": False}, "--compute-us-per-token has no effect without --pipeline"),
        ({"pipeline": False, "compute_us_per_token": None}, "--spin has no effect without --pipeline"),
    ],
)
def test_what_can_not_be_is_refused(gguf_path: Path, console: Console, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        execute_pipeline(request_of(gguf_path, **asked), console)
