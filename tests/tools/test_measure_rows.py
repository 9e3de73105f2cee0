from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lazyio.kernels.expand_rows import SUPPORTED
from lazyio.ple.dtypes import TYPES

TOOL = Path(__file__).resolve().parents[2] / "tools" / "measure_rows.py"


@pytest.fixture
def tool() -> ModuleType:
    loading = importlib.util.spec_from_file_location("measure_rows", TOOL)
    loaded = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(loaded)
    return loaded


def test_every_type_has_rows_that_its_blocks_make_up(tool: ModuleType):
    for stored in SUPPORTED:
        assert tool.lengths(stored)
        for values in tool.lengths(stored):
            TYPES[stored].row_bytes(values)
    assert tool.lengths("Q4_0") == [160, 8960]
    assert TYPES["Q4_0"].row_bytes(8960) == TYPES["Q4_K"].row_bytes(8960) == 5040


@pytest.mark.gpu
def test_a_figure_for_each_and_none_for_wrong_values(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    tool.main(types="Q4_0,EXL3_K4", rows=2048, dtype="bfloat16", rounds=3)
    assert "wrong" not in capsys.readouterr().out
    expand = tool.expand_rows
    monkeypatch.setattr(tool, "expand_rows", lambda packed, *rest: expand(packed.roll(1, 0), *rest))
    tool.main(types="Q4_0", rows=2048, dtype="bfloat16", rounds=3)
    assert "wrong values" in capsys.readouterr().out
