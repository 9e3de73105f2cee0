from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

from lazyio.bench.headline import steps

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SMALL = {"SIZE": "tiny", "DEVICE": "cpu", "ROWS": "4000", "PROMPTS": "40,60", "ROUNDS": "2"}
SMALL |= {"MODES": "off,on-bare", "LOOKAHEAD": "0"}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headline", TOOLS / "headline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interrupted_one_goes_on_where_it_stopped(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, results = tmp_path / "headline", tmp_path / "headline" / "results"
    variables = {**SMALL, "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    do = steps.do

    def interrupted_after_one(*arguments: object) -> None:
        if (results / "40-1.json").exists():
            raise KeyboardInterrupt
        do(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(steps, "do", interrupted_after_one)
        first = CliRunner().invoke(tool.app, [], env=variables)
    assert first.exit_code == 130, first.output
    assert first.stderr.splitlines()[-1] == (
        "headline: interrupted; what was measured is kept, and the same command goes on"
    )
    assert ways_of(first.stdout) == [("40", "off"), ("40", "on-bare"), ("40", "off")]
    measured = (results / "40-1.json").stat().st_mtime_ns
    second = CliRunner().invoke(tool.app, [], env=variables)
    assert second.exit_code == 0, second.output
    assert "making" not in second.stderr
    assert (results / "40-1.json").stat().st_mtime_ns == measured
    assert ways_of(second.stdout) == [(tokens, way) for tokens in ("40", "60") for way in ("off", "on-bare", "off")]
    figures = json.loads((results / "headline.json").read_text())["figures"]["60"]["on-bare +0"]
    assert len(figures["T, ms"]) == 2
    assert all(count > 0 for count in figures["reads"])
    assert {path.name for path in folder.iterdir()} == {"lock", "results", "qwen4_exp-tiny-F8_E4M3-4000"}


def ways_of(output: str) -> list[tuple[str, str]]:
    rows = [line.split() for line in output.splitlines()]
    return [(row[0], row[1]) for row in rows if row[:1] in (["40"], ["60"])]


def test_the_command_as_others_script_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "FOLDER": str(tmp_path), "ROUNDS": "5"}
    done = subprocess.run([TOOLS / "headline.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "headline: error: ROUNDS is 5; it must be even, for every other round goes backwards\n"


@pytest.fixture
def refused(tool: ModuleType, tmp_path: Path):
    def invoke(**variables: str) -> Result:
        result = CliRunner().invoke(tool.app, [], env={**SMALL, "FOLDER": str(tmp_path / "headline"), **variables})
        assert result.exit_code == 2, result.output
        assert not list(tmp_path.glob("headline/q*"))
        return result

    return invoke


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PROMPTS": "40,x"}, "PROMPTS is '40,x'; it can be numbers of tokens"),
        ({"PROMPTS": "40,40"}, "each once"),
        ({"ROUNDS": "3"}, "ROUNDS is 3; it must be even"),
        ({"MODES": "off,on"}, "must have on-bare"),
        ({"MODES": "on-bare,onn"}, "onn"),
        ({"TYPE": "Q4_0"}, "TYPE is 'Q4_0'; it can be F32, BF16, F16, F8_E4M3"),
        ({"DEVICE": "tpu"}, "it can be cpu, cuda or cuda:N"),
        ({"DEVICE": "cuda:99"}, "CUDA devices here"),
        ({"LAYERS": "5"}, "layers is 5; this model can have 2 to 4"),
        ({"ROWS": "100000000000"}, "mode off holds the table of"),
        ({"IDS": "/nowhere/ids.npy"}, "/nowhere/ids.npy"),
        ({"FOLDER": "/proc/headline"}, "can't read or write /proc/headline"),
    ],
)
def test_what_can_not_be_is_said_before_anything_is_made(refused, variables: dict[str, str], message: str) -> None:
    result = refused(**variables)
    (line,) = result.stderr.splitlines()
    assert line.startswith("headline: error: ")
    assert message in line


def test_a_true_table_has_16_gib_or_more(tool: ModuleType) -> None:
    assert tool._rows(None, "true", "F8_E4M3") * 160 >= 16 << 30
    assert tool._rows(None, "true", "BF16") == 54_000_000
    assert tool._rows(123, "true", "BF16") == 123
