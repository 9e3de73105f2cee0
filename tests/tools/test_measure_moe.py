from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from lazyio.kernels import moe
from lazyio.kernels.contract import error_of

TOOL = Path(__file__).parents[2] / "tools" / "measure_moe.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("triton")
    loading = importlib.util.spec_from_file_location("measure_moe", TOOL)
    module = importlib.util.module_from_spec(loading)
    sys.modules[loading.name] = module  # where dataclasses look for it
    loading.loader.exec_module(module)
    return module


@pytest.fixture
def sizes(tool: ModuleType) -> object:
    return tool.Sizes(experts=6, hidden=32, width=16, slots=2)


@pytest.fixture
def experts() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return tuple(torch.randn(6, *shape, generator=made).bfloat16() for shape in ((32, 32), (32, 16)))


def test_the_floor(tool: ModuleType, sizes: object, experts: tuple[torch.Tensor, torch.Tensor]):
    chosen, weights = torch.tensor([[0, 1], [1, 4], [0, 1]]), torch.ones(3, 2)
    work = tool.Work(torch.ones(3, 32), [(chosen, weights)], *experts)
    assert work.floor_us(sizes) == pytest.approx(1e6 * 3 * 2 * (32 * 32 + 32 * 16) / 4.3e12)
    many = tool.Work(torch.ones(3000, 32), [(chosen.repeat(1000, 1), weights.repeat(1000, 1))], *experts)
    assert many.floor_us(sizes) == pytest.approx(1e6 * 6000 * 2 * 3 * 16 * 32 / 790e12)


def test_choices_are_of_more_bytes_than_are_cached(
    tool: ModuleType, sizes: object, experts: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tool, "CACHED_BYTES", 5 * (32 * 32 + 32 * 16) * 2)
    work = tool.work_of(1, experts, sizes)
    assert len(work.choices) == 3
    assert all(len(chosen.unique()) == 2 for chosen, _ in work.choices)


def test_torch_is_the_layer_without_kernels(
    tool: ModuleType, sizes: object, experts: tuple[torch.Tensor, torch.Tensor]
):
    work = tool.work_of(5, experts, sizes)
    before = tool.layers.usable
    (found, *_) = tool.of_torch(work)()
    assert error_of([found], [moe.reference(work.x, *work.choices[0], *experts)], 1e-2) <= 1e-2
    assert tool.layers.usable is before


def test_launches_that_are_compared_differ(tool: ModuleType):
    for launch in (moe.BY_PAIR, *moe.BY_TILE):
        for body, is_packed in (("gate_up", False), ("down", False), ("gate_up", True), ("down", True)):
            some = tool.configs(launch, body, is_packed)
            assert len(set(some)) == len(some) > 8


def test_without_a_gpu(tool: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = tool.typer.Typer()
    app.command()(tool.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "there is no GPU" in result.output
