import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from lazyio import inspect as facts
from lazyio import settings
from lazyio.cli import app
from lazyio.errors import ReadError, TableError
from lazyio.version import __version__


def lazyio(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tensor("per_layer_token_embd.weight", np.zeros((10, 256), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_version() -> None:
    result = lazyio("--version")
    assert (result.exit_code, result.stdout) == (0, f"lazyio {__version__}\n")


def test_without_a_command_there_is_help() -> None:
    result = lazyio()
    assert result.exit_code == 2
    assert "inspect" in result.output


def test_inspect_for_people(model: Path) -> None:
    result = lazyio("inspect", model)
    assert result.exit_code == 0
    assert "per_layer_token_embd.weight" in result.stdout


def test_inspect_for_programs(model: Path) -> None:
    result = lazyio("inspect", model, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["path"] == str(model)
    assert [table["tensor"] for table in document["tables"]] == ["per_layer_token_embd.weight"]


def test_bench_is_a_command() -> None:
    result = lazyio("bench", "--help")
    assert result.exit_code == 0
    assert "Compare lazy modes" in result.stdout


def test_settings() -> None:
    result = lazyio("settings")
    assert (result.exit_code, result.stdout) == (0, settings.document())


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TableError("no table\nin model.gguf"), "no table in model.gguf"),
        (ReadError("it came short", path="p", offset=0, wanted=2, got=1, errno=errno.EIO), "it came short"),
        (PermissionError(errno.EACCES, "Permission denied", "model.gguf"), "Permission denied: model.gguf"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("socket is gone"), "socket is gone"),
    ],
)
def test_an_error_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, error: Exception, line: str) -> None:
    def fail(path: str) -> None:
        raise error

    monkeypatch.setattr(facts, "inspect", fail)
    result = lazyio("inspect", "model.gguf")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"lazyio: error: {line}\n")


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "inspect", lambda path: 1 / 0)
    assert isinstance(lazyio("inspect", "model.gguf").exception, ZeroDivisionError)


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, `sys.argv` being what a user typed."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=60)


MAIN = "from lazyio.cli import main; main()"


def test_bad_input_gives_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF\x03")
    done = run(MAIN, "inspect", str(tmp_path / "damaged.gguf"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lazyio: error: ")
    assert "damaged.gguf" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bad_variable_is_named(model: Path) -> None:
    done = run(MAIN, "inspect", str(model), LAZYIO_WORKERS="many")
    assert done.returncode == 2
    assert done.stderr == "lazyio: error: LAZYIO_WORKERS is 'many'; it can be a whole number from 1 to 1024\n"


WARNED = """
import warnings
from lazyio import cli, inspect

def warn(path):
    warnings.warn("it crawls", stacklevel=1)
    return []

inspect.inspect = warn
cli.main()
"""


def test_a_warning_is_one_line(model: Path) -> None:
    done = run(WARNED, "inspect", str(model))
    assert (done.returncode, done.stderr) == (0, "lazyio: warning: it crawls\n")


INTERRUPTED = """
import atexit, os, signal, sys
from lazyio import cli, inspect

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

def interrupt_twice(path):
    try:
        interrupt()
    finally:
        interrupt()

moment = sys.argv.pop()
if moment == "before":
    cli.app = interrupt
elif moment == "at the end":
    atexit.register(interrupt)
inspect.inspect = interrupt_twice if moment == "twice" else interrupt
cli.main()
"""


@pytest.mark.parametrize("moment", ["before", "once", "twice", "at the end"])
def test_interruption_is_one_line_and_status_130(model: Path, moment: str) -> None:
    done = run(INTERRUPTED, "inspect", str(model), moment)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "lazyio: interrupted\n")


@pytest.mark.parametrize("arguments", [("--version",), ("inspect", "missing.gguf")])
def test_an_interrupt_after_all_is_said_changes_nothing(arguments: tuple[str, ...]) -> None:
    code = """
import atexit, os, signal, sys
from lazyio import cli

atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
cli.main()
"""
    done, alone = run(code, *arguments), run(MAIN, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (alone.returncode, alone.stdout, alone.stderr)


TERMINATED = """
import os, signal, sys
from lazyio import cli
from lazyio.bench import command

def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)

command.execute = terminate
cli.main()
"""


def test_the_end_of_a_measurement_is_one_line_and_status_143(model: Path) -> None:
    done = run(TERMINATED, "bench", str(model))
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "lazyio: terminated\n")


def test_a_reader_that_leaves_is_no_error(model: Path) -> None:
    command = f'{sys.executable} -c "{MAIN}" settings | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_a_character_that_the_terminal_has_not_is_no_error() -> None:
    code = "import sys; from lazyio import cli; cli.app = lambda: print('\\u00e9t\\u00e9'); cli.main()"
    done = run(code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "?t?\n", "")
