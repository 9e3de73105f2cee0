from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

TOOL = Path(__file__).parents[2] / "tools" / "measure_trunk.py"
TINY = ["--size", "tiny", "--tokens", "60", "--ubatch", "32", "--rows", "4000"]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tool takes the GPU, on which tiny models differ more"),
    pytest.mark.filterwarnings("ignore"),  # those of transformers
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("transformers")
    loading = importlib.util.spec_from_file_location("measure_trunk", TOOL)
    module = importlib.util.module_from_spec(loading)
    sys.modules[loading.name] = module  # where dataclasses look
    loading.loader.exec_module(module)
    return module


def run(tool: ModuleType, *options: str) -> str:
    app = tool.typer.Typer()
    app.command()(tool.main)
    result = CliRunner().invoke(app, [*TINY, *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_both_models_and_every_part(tool: ModuleType, monkeypatch: pytest.MonkeyPatch):
    shown = []
    monkeypatch.setattr(tool, "show_times", lambda times, layers: shown.append((times, layers)))
    output = run(tool, "--rounds", "2")
    ((times, layers),) = shown
    assert {name: len(some) for name, some in times.items()} == {tool.OURS: 4, tool.THEIRS: 4}
    assert layers == 4
    for name in {*tool.BLOCKS.values(), *tool.AROUND.values(), *tool.WITHIN.values(), "the rest", "whole"}:
        assert name in output


def test_tokens_that_have_blocks_with_equal_scores(tool: ModuleType):
    assert "its time over ours" in run(tool, "--tokens", "128")


def test_fewer_layers_than_transformers_takes(tool: ModuleType):
    assert tool.THEIRS not in run(tool, "--layers", "2", "--alone").lower()
    app = tool.typer.Typer()
    app.command()(tool.main)
    result = CliRunner().invoke(app, [*TINY, "--layers", "3"])
    assert result.exit_code == 2
    assert "no fewer than 4 layers" in result.output


def test_alone_with_kernels(tool: ModuleType):
    output = run(tool, "--alone", "--kernels", "3")
    assert tool.THEIRS not in output
    assert "aten::" in output


def test_other_results_are_seen(tool: ModuleType):
    ways = {tool.OURS: lambda: torch.ones(3), tool.THEIRS: lambda: torch.tensor([1.0, 1.0, 1.1])}
    with pytest.raises(SystemExit, match="the results disagree"):
        tool.compare(ways, 1, torch.device("cpu"))
