from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lazyio.engine.synthetic.configs import ARCHITECTURES, SIZES
from lazyio.engine.weights.load import open_source
from lazyio.ple.tables import find_table

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_model.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_model", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_model"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_model"]


@pytest.fixture(scope="module")
def run(tool):
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(tool.app, [str(argument) for argument in arguments])

    return invoke


def test_it_offers_all_that_can_be_made(tool):
    assert [choice.value for choice in tool.Architecture] == list(ARCHITECTURES)
    assert [choice.value for choice in tool.Size] == list(SIZES)


def test_the_command_as_others_script_it(tmp_path: Path):
    command = [sys.executable, TOOL, "OUT", "--arch", "qwen4_exp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("wrote OUT: qwen4_exp of 4 layers, a table of 32768 rows of 32 values, ")
    assert done.stderr == ""
    assert {path.name for path in (tmp_path / "OUT").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_without_torch_it_says_how_to_install_it(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("lazyio.engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(tmp_path / "OUT", "--arch", "gemma4")
    assert result.exit_code == 2
    assert result.stderr == (
        "make_model: error: models run on torch, which is not installed: pip install 'lazyio[engine]'\n"
    )


def test_what_the_system_refuses_is_one_line(run):
    result = run("/proc/OUT", "--arch", "gemma4")
    assert result.exit_code == 2
    assert result.stderr == "make_model: error: can't write /proc/OUT: No such file or directory\n"


@pytest.mark.parametrize(
    ("out", "arguments", "dtype", "shape"),
    [
        ("m.gguf", ["--arch", "qwen4_exp"], "Q8_0", (32768, 32)),
        ("m.gguf", ["--arch", "gemma4", "--type", "Q5_K", "--trunk", "Q4_0"], "Q5_K", (4096, 512)),
        ("m", ["--arch", "gemma3n", "--format", "gguf", "--layers", 4], "Q8_0", (4096, 256)),
        ("m", ["--arch", "gemma3n"], "BF16", (4096, 512)),
        ("m", ["--arch", "qwen4_exp", "--type", "F8_E4M3", "--rows", 20000, "--shards", 2], "F8_E4M3", (19968, 32)),
        ("m", ["--arch", "qwen4_exp", "--size", "true", "--rows", 2000, "--no-trunk"], "BF16", (1920, 160)),
    ],
)
def test_options(tmp_path: Path, run, out: str, arguments: list[object], dtype: str, shape: tuple[int, int]):
    result = run(tmp_path / out, *arguments)
    assert result.exit_code == 0, result.output
    spec = find_table(str(tmp_path / out))
    assert spec.dtype == dtype
    assert spec.row_values == shape[1]
    assert abs(spec.rows - shape[0]) <= 128  # padding
    if "--layers" in arguments:
        (tmp_path / out).rename(tmp_path / "m.gguf")
        assert open_source(tmp_path / "m.gguf").config["num_hidden_layers"] == 4


def test_parts_a_seed_and_force(tmp_path: Path, run):
    arguments = [tmp_path / "m.gguf", "--arch", "qwen3_5", "--parts", 3]
    assert "m-00001-of-00003.gguf and 2 more: qwen3_5 of 4 layers, " in run(*arguments).output
    last = tmp_path / "m-00003-of-00003.gguf"
    before = last.read_bytes()
    refused = run(*arguments, "--seed", 1)
    assert (refused.exit_code, last.read_bytes()) == (2, before)
    assert "exists" in refused.output
    assert run(*arguments, "--seed", 1, "--force").exit_code == 0
    assert last.read_bytes() != before


@pytest.mark.parametrize(
    ("out", "arguments", "message"),
    [
        ("m.gguf", ["--format", "folder"], "--format folder contradicts the name m.gguf"),
        ("m.gguf", ["--no-trunk"], "--no-trunk can't be followed: it is for folders"),
        ("m.gguf", ["--shards", 4], "--shards can't be followed: it is for folders"),
        ("m", ["--parts", 2], "--parts can't be followed: it is for GGUF files"),
        ("m", ["--layers", 1], "can be made with 2 layers or more; got 1"),
        ("m", ["--type", "IQ4_NL"], "a folder can have parameters of"),
        ("m", ["--arch", "qwen3_5", "--type", "F32"], "--type can't be followed: qwen3_5 has no table"),
        ("m", ["--arch", "gemma4", "--shards", 4], "--shards can't be followed: gemma4 has no table of n-grams"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, run, out: str, arguments: list[object], message: str):
    given = arguments if "--arch" in arguments else ["--arch", "qwen4_exp", *arguments]
    result = run(tmp_path / out, *given)
    assert result.exit_code == 2
    assert message in result.output
    assert not list(tmp_path.iterdir())
