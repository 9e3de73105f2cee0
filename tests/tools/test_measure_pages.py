from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from lazyio.engine.kv.pieces import Paged as PagedEntries

TOOLS = Path(__file__).parents[2] / "tools"


def load(name: str) -> ModuleType:
    loading = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert loading is not None
    assert loading.loader is not None
    module = importlib.util.module_from_spec(loading)
    sys.modules[name] = module  # where dataclasses look for it
    loading.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load("measure_pages")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "model"
    made = CliRunner().invoke(load("make_model").app, [str(folder), "--arch", "qwen4_exp", "--layers", "4"])
    assert made.exit_code == 0, made.output
    return folder


def measured(tool: ModuleType, model: Path) -> None:
    tool.main(str(model), contexts="300", streams="2", steps=2, rounds=1, device="cpu")


def test_all_ways_are_told(tool: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(tool, model)
    told = capsys.readouterr().out.split("300 tokens, 2 streams")[1]
    assert [line.split()[0] for line in told.splitlines()[1:] if line.strip()] == ["windows", "pages", "windows"]


def test_ways_that_disagree_are_not_timed(
    tool: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = PagedEntries.entries.__get__
    monkeypatch.setattr(PagedEntries, "entries", property(lambda piece: torch.roll(entries(piece), 1, 0)))
    with pytest.raises(SystemExit, match="the ways disagree after 300 tokens of 2 streams"):
        measured(tool, model)
    assert "seat" not in capsys.readouterr().out
