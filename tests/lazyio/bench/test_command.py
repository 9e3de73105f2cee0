from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from lazyio.bench import command
from lazyio.cli import app
from lazyio.fetchers.mmap import MmapFetcher

QUICK = ("--rounds", "1", "--max-repeats", "0")


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture
def in_memory(gguf_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(shutil.copy(gguf_path, folder))


def test_a_whole_comparison(gguf_path: Path, ids_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    modes = "on-bare,on,on-direct,uring"
    asked = ("--cold", "--modes", modes, "--ids", ids_path, "--ubatch", "2048", "--rounds", "5", "--json", result)
    done = bench(gguf_path, *asked)
    assert done.exit_code == 0, done.output
    document = json.loads(result.read_text())
    assert {run["mode"] for run in document["runs"]} == set(modes.split(","))
    assert {run["round"] for run in document["runs"]} == set(range(5))
    assert document["workload"]["tokens"] == 600
    assert document["device_limit"]["iops"] > 0
    assert f"Results: {result}" in done.stdout
    table = done.stdout.split("cold: median")[1].split("Table: ")[0].splitlines()
    assert 80 < max(map(len, table)) <= 120


def test_a_picture(gguf_path: Path, tmp_path: Path) -> None:
    done = bench(gguf_path, "--warm", "--modes", "on", *QUICK, "--plot", tmp_path / "picture.png")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("temperature", ["--cold", "--warm"])
def test_a_filesystem_in_memory(in_memory: Path, temperature: str) -> None:
    line = [sys.executable, "-c", "from lazyio.cli import main; main()", "bench", str(in_memory), temperature]
    done = subprocess.run([*line, "--modes", "on", *QUICK], capture_output=True, text=True)
    if temperature == "--warm":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2
    assert "rows/s" not in done.stdout
    assert done.stderr.startswith("lazyio: error: ")
    assert "tmpfs" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_table_that_someone_maps(gguf_path: Path) -> None:
    held = np.memmap(gguf_path, mode="r")
    assert held[100_000:200_000].sum() > 0
    done = bench(gguf_path, "--modes", "on", *QUICK)
    del held
    assert done.exit_code == 2
    assert "stayed in memory" in done.stderr
    assert "this process" in done.stderr
    assert "rows/s" not in done.stdout


def test_wrong_bytes_leave_no_result(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_take = MmapFetcher.take

    def wrong(self: MmapFetcher, ids: object, out: np.ndarray) -> object:  # type: ignore[type-arg]
        stats = true_take(self, ids, out)  # type: ignore[arg-type]
        out[0, 0] ^= not self.options.advice
        return stats

    monkeypatch.setattr(MmapFetcher, "take", wrong)
    done = bench(gguf_path, "--modes", "on,on-bare", *QUICK, "--json", tmp_path / "result.json")
    assert done.exit_code == 2
    assert "on-bare" in done.stderr
    assert "the whole comparison is void" in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_nothing_is_measured_where_the_picture_could_not_be_drawn(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "execute", lambda *arguments: pytest.fail("measured"))
    done = bench(gguf_path, "--plot", tmp_path / "picture.png")
    assert done.exit_code == 2
    assert "pip install 'lazyio[plot]'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--modes", "on", "--workers", "8"),
        ("--ids", "absent.npy", "--uniform"),
        ("--preload", "hot-set", "--direct-io", "on"),
        ("--modes", "quick"),
        ("--ids", "absent.npy"),
        ("--trace", "absent.npz"),
        ("--tensor", "absent"),
    ],
)
def test_what_can_not_be_is_one_line(gguf_path: Path, arguments: tuple[str, ...]) -> None:
    done = bench(gguf_path, *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("lazyio: error: ")
    assert done.stderr.count("\n") == 1


def test_every_option_has_a_line_of_help() -> None:
    done = bench("--help")
    assert done.exit_code == 0
    for said in ("--cold", "--ids", "--trace", "--workers", "--min-iops", "--preload", "2048", "16384", "32768"):
        assert said in done.stdout
