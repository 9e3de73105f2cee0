from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from lazyio.ple.synthetic import expected_rows
from lazyio.ple.tables import find_table

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_table.py"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("make_table", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(module.app, [str(argument) for argument in arguments])

    return invoke


def test_the_command_as_others_script_it(tmp_path: Path):
    command = [sys.executable, TOOL, "OUT.gguf", "--rows", "4800", "--type", "IQ4_NL"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("wrote OUT.gguf: 4800 rows of 90 bytes (160 values of IQ4_NL), 421.9 KiB in ")
    assert done.stderr == ""
    spec = find_table(str(tmp_path / "OUT.gguf"))
    data = np.fromfile(tmp_path / "OUT.gguf", np.uint8, 4800 * 90, offset=spec.extents[0].offset)
    np.testing.assert_array_equal(data.reshape(4800, 90), expected_rows(range(4800)))


@pytest.mark.parametrize(
    ("arguments", "dtype", "row_values"),
    [
        (["t.gguf"], "IQ4_NL", 160),
        (["t.gguf", "--type", "Q8_0", "--row-values", 64], "Q8_0", 64),
        (["t.gguf", "--arch", "gemma4", "--type", "Q5_K"], "Q5_K", 8960),
        (["t.bin", "--format", "gguf", "--vocab", 100], "IQ4_NL", 160),
        (["t.safetensors", "--shards", 5], "BF16", 160),
        (["folder", "--type", "F8_E4M3", "--shards", 8, "--files", 4], "F8_E4M3", 160),
        (["folder", "--arch", "gemma3n", "--row-values", 512], "BF16", 512),
    ],
)
def test_options(tmp_path: Path, run, arguments: list[object], dtype: str, row_values: int):
    out = tmp_path / str(arguments[0])
    result = run(out, *arguments[1:], "--rows", 500)
    assert result.exit_code == 0, result.output
    assert str(out) in result.output
    spec = find_table(str(out))
    assert (spec.rows, spec.dtype, spec.row_values) == (500, dtype, row_values)


def test_parts_and_holes(tmp_path: Path, run):
    result = run(tmp_path / "t.gguf", "--rows", 5_000_000, "--parts", 3, "--sparse")
    assert "t-00001-of-00003.gguf and 2 more: 5000000 rows" in result.output
    assert "as holes" in result.output
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) < 100_000


def test_existing_files_are_replaced_by_force_only(tmp_path: Path, run):
    out = tmp_path / "t.gguf"
    out.write_text("old")
    refused = run(out, "--rows", 500)
    assert refused.exit_code == 2
    assert "exists" in refused.output
    assert out.read_text() == "old"
    assert run(out, "--rows", 500, "--force").exit_code == 0
    assert find_table(str(out)).rows == 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.gguf", "--rows", 500, "--shards", 4], "--shards is for safetensors, and a gguf table"),
        (["t.gguf", "--rows", 500, "--files", 1], "--files is for safetensors, and a gguf table"),
        (["t.safetensors", "--rows", 500, "--parts", 1], "--parts is for gguf, and a safetensors table"),
        (["folder", "--rows", 500, "--vocab", 9], "--vocab is for gguf, and a safetensors table"),
        (["t.gguf", "--rows", 500, "--format", "safetensors"], "--format safetensors contradicts the name t.gguf"),
        (["t.gguf", "--rows", 5], "5 rows can't hold"),
        (["t.gguf", "--rows", -5], "got -5"),
        (["t.gguf", "--rows", 500, "--type", "Q4_K"], "no whole number of Q4_K blocks"),
        (["t.gguf", "--rows", 500, "--vocab", -2], "got 500 and -2"),
        (["t.gguf", "--rows", 500, "--parts", 0], "got 0"),
        (["absent/t.gguf", "--rows", 500], "no folder"),
    ],
)
def test_a_refusal_is_one_line(tmp_path: Path, run, arguments: list[object], message: str):
    result = run(tmp_path / str(arguments[0]), *arguments[1:])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1
    assert os.listdir(tmp_path) == []
