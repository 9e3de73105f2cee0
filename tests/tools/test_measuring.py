"""What the tools that measure lack, they say in one line."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
OF_KERNELS = ("attention", "blocks", "delta_rule", "moe", "packed")
ON_GPU = (*OF_KERNELS, "rows", "trunk")
ALL = (*ON_GPU, "pages", "cache", "threads")

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(name, *arguments, without="")`: what a tool says as it ends, without a GPU and without a package."""

    def run(name: str, *arguments: str, without: str = "") -> str:
        if name in OF_KERNELS and without != "triton":
            pytest.importorskip("triton")
        path = str(TOOLS / f"measure_{name}.py")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [path, *arguments])
            patch.setattr(torch.cuda, "is_available", lambda: False)
            if without:
                patch.setitem(sys.modules, without, None)
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(path, run_name="__main__")
        said = capsys.readouterr()
        return said.out + said.err + ("" if isinstance(ended.value.code, int) else f"{ended.value.code}\n")

    return run


def is_one_line(said: str, name: str) -> bool:
    return said.startswith(f"measure_{name}: error: ") and said.count("\n") == 1


@pytest.mark.parametrize("name", ALL)
def test_help(name: str, run: Run) -> None:
    assert "Usage" in run(name, "--help")


@pytest.mark.parametrize("name", ON_GPU)
def test_no_gpu(name: str, run: Run) -> None:
    said = run(name)
    assert is_one_line(said, name)
    assert "there is no" in said


@pytest.mark.parametrize("name", OF_KERNELS)
@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_no_triton(name: str, arguments: tuple[str, ...], run: Run) -> None:
    said = run(name, *arguments, without="triton")
    assert is_one_line(said, name)
    assert "kernels are measured with torch and Triton: " in said


@pytest.mark.parametrize("name", [*OF_KERNELS, "rows", "pages", "trunk"])
def test_no_torch(name: str, run: Run) -> None:
    assert is_one_line(run(name, "--help", without="torch"), name)


@pytest.mark.parametrize(("name", "arguments"), [("pages", 1), ("cache", 2), ("threads", 1)])
def test_no_model_or_table(name: str, arguments: int, run: Run) -> None:
    said = run(name, *["absent"] * arguments)
    assert is_one_line(said, name)
    assert "absent" in said
