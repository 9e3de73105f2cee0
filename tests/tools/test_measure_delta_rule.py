from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from lazyio.kernels.gated_delta_rule import ADVANCE, STEP, Config

TOOL = Path(__file__).parents[2] / "tools" / "measure_delta_rule.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("triton")
    loading = importlib.util.spec_from_file_location("measure_delta_rule", TOOL)
    module = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(module)
    return module


RECURRENCE = """
import runpy, sys, torch
from lazyio.kernels.gated_delta_rule import Arguments, reference
tool = runpy.run_path(sys.argv[1])
given = Arguments.random(torch.device("cpu"), 0, [(5, 0)], dims=(16, 16))
outputs, memory = given.results(reference)
print(tool["error_beside"](tool["one_launch"](given), (outputs, memory)))
print(tool["error_beside"]((outputs, 1.1 * memory), (outputs, memory)))
"""


def test_the_recurrence_is_the_rule():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", RECURRENCE, TOOL], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    error, of_another = map(float, done.stdout.split())
    assert error < 1e-6
    assert of_another == pytest.approx(0.1)


def test_launches_are_put_back(tool: ModuleType):
    before, config = dict(ADVANCE), Config(16, 2)
    with tool.launched_as("ADVANCE", config):
        assert {**before, torch.bfloat16: [config]} == tool.rule.ADVANCE
    with tool.launched_as("STEP", config):
        assert config == tool.rule.STEP
    assert before == tool.rule.ADVANCE
    assert tool.rule.STEP == STEP


def test_without_a_gpu(tool: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = tool.typer.Typer()
    app.command()(tool.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "there is no GPU" in result.output
