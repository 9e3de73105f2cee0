"""`lazyio bench --verify`: what a fetcher does wrong is named in one line."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from lazyio.bench.options import Request
from lazyio.cli import app
from lazyio.errors import SettingError
from lazyio.fetchers import registry
from lazyio.fetchers.base import Bytes, Extent, FetcherOptions, Landed, ReadPlan, ReadStats
from lazyio.fetchers.pread import PreadFetcher
from lazyio.ple.tables import find_table

QUICK = ("--tokens", "100", "--ubatch", "40", "--rounds", "1", "--max-repeats", "0")


class Buffered(PreadFetcher):
    """Reads any bytes of a file, and has its rows taken from what it read, not from a map."""

    def __init__(self, extents: Sequence[Extent], row_bytes: int, options: FetcherOptions) -> None:
        super().__init__(extents, row_bytes, replace(options, direct_io="off"))
        self.direct_io = True


class Shifted(Buffered):
    """Takes every row for the one before."""

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        return super().read(replace(plan, offset=plan.offset - self.row_bytes), buffer, landed)


class Careless(Buffered):
    """Takes what a read brings for what was asked."""

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        stats = super().read(plan, buffer)
        for dest, length in zip(plan.dest.tolist(), plan.length.tolist(), strict=True):
            buffer[dest + length - 40 : dest + length] = 0  # of the last row
        return stats


class Cut(Buffered):
    """Its file loses its second half when it is read from."""

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        path = self.extents[0].path
        os.truncate(path, os.path.getsize(path) // 2)
        return super().read(plan, buffer, landed)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "doubles", sys.modules[__name__])
    for double in (Shifted, Careless, Cut):
        monkeypatch.setitem(registry._OURS, double.__name__.lower(), f"doubles:{double.__name__}")


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments), *QUICK])


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("shifted", "; what was gathered is row {before}: it was read at a wrong offset, or put in a wrong place"),
        ("careless", "; they differ from byte 50 of the row on, of 90, as after a short read"),
    ],
)
def test_a_wrong_row_is_named(gguf_path: Path, tmp_path: Path, mode: str, said: str) -> None:
    result = tmp_path / "result.json"
    done = bench(gguf_path, "--modes", mode, "--verify", "4", "--json", result)
    assert done.exit_code == 2
    assert done.stderr.startswith("lazyio: error: row ")
    assert done.stderr.count("\n") == 1
    row = int(done.stderr.split()[3])
    offset = find_table(gguf_path).extents[0].offset + 90 * row
    assert f"row {row} was gathered with other bytes than {gguf_path} has at offset {offset}" in done.stderr
    assert said.format(before=row - 1) in done.stderr
    assert "rows/s" not in done.stdout
    assert not result.exists()


def test_a_file_that_is_cut_in_the_middle_of_a_run_is_named(gguf_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(gguf_path, tmp_path))
    size = path.stat().st_size
    done = bench(path, "--modes", "cut", "--verify", "1")
    assert done.exit_code == 2
    assert done.stderr.startswith("lazyio: error: ")
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert str(size // 2) in done.stderr


def test_right_rows_pass_and_the_results_say_so(gguf_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = bench(gguf_path, "--modes", "on,on-direct", "--verify", "4", "--json", result)
    assert done.exit_code == 0, done.output
    assert json.loads(result.read_text())["method"]["verify"] == 4
    assert "Verified: 4 rows of every gather were read once more and compared" in done.stdout


def test_unless_asked_nothing_is_verified(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "result.json"
    done = bench(gguf_path, "--modes", "on", "--json", result)
    assert json.loads(result.read_text())["method"]["verify"] == 0
    assert "Verified" not in done.stdout
    monkeypatch.setenv("LAZYIO_VERIFY", "3")
    done = bench(gguf_path, "--modes", "on", "--json", result)
    assert json.loads(result.read_text())["method"]["verify"] == 3
    assert "Verified: 3 rows" in done.stdout


def test_prompts_are_verified_too(gguf_path: Path, tmp_path: Path) -> None:
    asked = ("--pipeline", "--compute-us-per-token", "10", "--spin", "--tokens", "100", "--rounds", "1")
    where = ("--limit-reads", "200", "--verify", "2", "--json", tmp_path / "result.json")
    done = CliRunner().invoke(app, ["bench", *map(str, (gguf_path, *asked, *where, "--modes", "on-direct"))])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "result.json").read_text())["verify"] == 2
    assert "Verified: 2 rows" in done.stdout
    done = CliRunner().invoke(app, ["bench", *map(str, (gguf_path, *asked, *where, "--modes", "shifted"))])
    assert done.exit_code == 2
    assert "it was read at a wrong offset" in done.stderr


@pytest.mark.parametrize("count", [-1, 1 << 21])
def test_a_number_of_rows_that_can_not_be(count: int) -> None:
    with pytest.raises(SettingError, match="verify"):
        Request(verify=count).arms()


def test_every_arm_is_verified() -> None:
    arms, _ = Request(modes="off,on-bare,on,on-direct,uring", verify=5).arms()
    assert [arm.settings["verify"] for arm in arms] == [5] * 5
    assert np.all(["verify" not in arm.settings for arm in Request().arms()[0]])
