"""The options of `lazyio run`, which need no torch. What it does is tested with the engine."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lazyio.cli import app
from lazyio.errors import SettingError
from lazyio.run import Request


def lazyio(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_it_is_a_command() -> None:
    result = lazyio("run", "--help")
    assert result.exit_code == 0
    assert "Generate a reply" in result.stdout


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "give one prompt"),
        ({"prompt": [], "ids": None}, "give one prompt"),
        ({"prompt": ["-", "a", "-"]}, "-p - is given more than once"),
        ({"prompt": ["a"], "ids": Path("ids.npy")}, "give one prompt"),
        ({"ids": Path("ids.npy"), "chat": True}, "--chat and --no-chat have no effect on --ids"),
        ({"ids": Path("ids.npy"), "chat": False}, "--chat and --no-chat have no effect on --ids"),
    ],
)
def test_options_that_contradict_each_other(given: dict[str, object], match: str) -> None:
    Request(Path("model"), prompt=["a", "-"], chat=True).check()
    Request(Path("model"), ids=Path("ids.npy")).check()
    with pytest.raises(SettingError, match=match):
        Request(Path("model"), **given).check()  # type: ignore[arg-type]


def test_a_contradiction_is_one_line(tmp_path: Path) -> None:
    result = lazyio("run", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("lazyio: error: give one prompt: ")
    assert result.stderr.count("\n") == 1


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from lazyio.cli import main
main()
"""


def test_without_torch_it_says_how_to_install_it(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run("run", str(tmp_path), "-p", "hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lazyio: error: models run on torch, which is not installed: pip install 'lazyio[engine]'\n"
    done = run("kernels", "check", "--interpret")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lazyio: error: kernels run on torch, which is not installed: pip install 'lazyio[engine]'\n"
    assert run("settings").returncode == 0
