from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from lazyio.kernels.block_selection import reference as selection_reference
from lazyio.kernels.sparse_attention import CAUSAL, SELECTED, Config, reference

TOOL = Path(__file__).parents[2] / "tools" / "measure_attention.py"
CPU = torch.device("cpu")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With small sizes."""
    pytest.importorskip("triton")
    loading = importlib.util.spec_from_file_location("measure_attention", TOOL)
    module = importlib.util.module_from_spec(loading)
    monkeypatch.setitem(__import__("sys").modules, "measure_attention", module)
    loading.loader.exec_module(module)
    for name, size in {"HEADS": 4, "DIM": 16, "INDEX_HEADS": 2, "INDEX_DIM": 16, "COUNT": 8}.items():
        monkeypatch.setattr(module, name, size)
    return module


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def test_what_layers_do_without_kernels_is_the_reference(tool: ModuleType):
    given = tool.Chunk.random(30, 101, 0.0, CPU)
    selected = selection_reference(given.queries, given.keys, 71, count=8, ratio=4, group=1)
    expected = reference(given.q, given.k, given.v, selected, scale=16**-0.5)
    assert relative(given.masked(), expected) < 1e-2
    assert relative(given.masked(), reference(given.q, given.k, given.v, None, scale=16**-0.5)) > 0.1
    assert tool.errors_of(given, {tool.MASKED: given.masked})[tool.MASKED] < 1e-2
    wrong = tool.errors_of(given, {tool.DENSE: given.masked, tool.SELECTION: lambda: selected})
    assert wrong[tool.DENSE] > 0.1
    assert wrong[tool.SELECTION] == 0


@pytest.mark.parametrize("before", [0, 71])
def test_torch_sees_the_keys_up_to_each_token(tool: ModuleType, before: int):
    given = tool.Chunk.random(30, 30 + before, 0.0, CPU)
    expected = reference(given.q, given.k, given.v, None, scale=16**-0.5)
    assert relative(given.torch(tool.SDPBackend.MATH), expected) < 1e-2


def test_queries_alike_choose_alike(tool: ModuleType):
    shared = []
    for alike in (0.0, 0.9):
        given = tool.Chunk.random(64, 800, alike, CPU)
        chosen = tool.best(tool.scores(given.queries, given.keys), 8)
        shared.append((chosen[1:] & chosen[:-1]).float().sum(-1).mean().item())
    assert shared[1] > shared[0] + 3


def test_a_prompt_is_cut_in_chunks(tool: ModuleType):
    prompt = tool.Chunk.random(40, 40, 0.0, CPU)
    part = prompt.cut(16, 32)
    assert (part.before, len(part.q), len(part.k), len(part.keys)) == (16, 16, 32, 8)
    assert part.select() is None  # no more blocks than may be seen


def test_launches_are_as_before_after_a_sweep(tool: ModuleType):
    for name, before in (("SELECTED", SELECTED), ("CAUSAL", CAUSAL)):
        with tool.launched_as(name, Config(16, 64, 4, 2)):
            assert getattr(tool.kernel, name)[2] == [Config(16, 64, 4, 2)]
        assert getattr(tool.kernel, name) is before


def test_without_a_gpu(tool: ModuleType):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    app = tool.typer.Typer()
    app.command()(tool.main)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2
    assert "there is no GPU" in done.output
