from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from lazyio import Unsupported, open_table
from lazyio.ple.synthetic import write_gguf

TOOL = Path(__file__).resolve().parents[2] / "tools" / "measure_cache.py"


def test_what_it_prints_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loading = importlib.util.spec_from_file_location("measure_cache", TOOL)
    tool = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(tool)
    table, ids = tmp_path / "table.gguf", tmp_path / "ids.npy"
    write_gguf(table, 4800, "IQ4_NL", 160)
    np.save(ids, np.random.default_rng(1).integers(0, 50, 400))
    try:
        open_table(table, **tool.OPENED).close()
    except Unsupported as refused:
        pytest.skip(str(refused))
    picture = tmp_path / "saved.png"
    tool.main(table, ids, budgets="1", ubatch=50, warm_ubatch=100, warm_tokens=200, rounds=1, plot=picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = " ".join(capsys.readouterr().out.split())
    counts = re.search(r"([\d,]+) rows read without a cache, ([\d,]+) with one", printed).groups()
    without, unbounded = (int(text.replace(",", "")) for text in counts)
    assert without > unbounded > 1000
    assert re.search(r"row cache │ (\d+\.\d)", printed)[1] == "100.0"
    assert "warm, 0 reads: np.take" in printed
    second = re.search(r"([\d,]+) without a cache, ([\d,]+) with an empty one, ([\d,]+) with the file", printed)
    bare, empty, loaded = (int(text.replace(",", "")) for text in second.groups())
    assert bare > empty > loaded
