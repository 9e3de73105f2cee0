from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

TOOL = Path(__file__).parents[2] / "tools" / "measure_blocks.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("triton")
    loading = importlib.util.spec_from_file_location("measure_blocks", TOOL)
    module = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(module)
    return module


@pytest.mark.parametrize("of", ["connection", "net", "table_block"])
def test_ways_agree_and_others_are_seen(tool: ModuleType, of: str):
    if torch.cuda.is_available():
        pytest.skip("with a GPU the tool compares them itself")
    ways = getattr(tool, of)(2, torch.device("cpu"))
    plain = {tool.TORCH: ways[tool.TORCH]}
    tool.check(plain)
    with pytest.raises(SystemExit, match=r"wrong differs from torch by 0\.1 of its size"):
        tool.check({**plain, "wrong": lambda: [1.1 * x for x in ways[tool.TORCH]()]})


def test_what_is_changed_is_put_back(tool: ModuleType):
    before = tool.ple_block.CONVOLVE
    with tool.changed(tool.ple_block, "CONVOLVE", (8, 128, 4)):
        assert tool.ple_block.CONVOLVE == (8, 128, 4)
    assert before == tool.ple_block.CONVOLVE


def test_without_a_gpu(tool: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = tool.typer.Typer()
    app.command()(tool.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "there is no GPU" in result.output
