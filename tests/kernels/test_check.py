from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lazyio.cli import app
from lazyio.errors import Unsupported
from lazyio.kernels import check
from lazyio.kernels.contract import Case, Kernel, Resources

CPU = torch.device("cpu")


def numbers(device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(8, generator=torch.Generator(device).manual_seed(seed))


def doubled(x: torch.Tensor) -> list[torch.Tensor]:
    return [2 * x]


DOUBLE = Kernel(
    name="double",
    run=doubled,
    reference=doubled,
    cases=[Case("bits", numbers), Case("near", numbers, 1e-3, planted=True), Case("many", numbers, compiled_only=True)],
    controls={"off": lambda x: x * 1.01, "reversed": lambda x: x.flip(0)},
    bodies=list,
)


def shown(monkeypatch: pytest.MonkeyPatch, kernel: Kernel[torch.Tensor]) -> tuple[bool, str]:
    monkeypatch.setattr(check, "load", lambda only: [kernel])
    console = Console(file=io.StringIO(), width=120)
    right = check.check_all(None, interpret=True, console=console)
    return right, " ".join(console.file.getvalue().split())


def test_a_kernel_that_is_right(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    finding = check.check(DOUBLE, CPU)
    assert finding == check.Finding("double", {"bits": (0.0, 0.0), "near": (0.0, 1e-3)}, 2, 2, (), ())
    right, text = shown(monkeypatch, DOUBLE)
    assert right
    assert "double 2 of 2 none 2 of 2 not compiled" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"run": lambda x: [2.01 * x]}, "double, near: the error is 0.005, the bound 0.001"),
        ({"run": lambda x: [2.0002 * x]}, "double, bits: the error is inf, the bound 0"),
        ({"controls": {"none": lambda x: x}}, "double, near: the fault 'none' is not seen"),
        ({"controls": {"less than the bound": lambda x: 1.0001 * x}}, "the fault 'less than the bound' is not seen"),
        ({"run": lambda x: [x[9]]}, "double, bits: IndexError: index 9 is out of bounds"),
        ({"controls": {"breaks": lambda x: x[9]}}, "double, near: IndexError: index 9 is out of bounds"),
    ],
)
def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch, change: dict[str, Callable], text: str):
    pytest.importorskip("triton")
    right, printed = shown(monkeypatch, replace(DOUBLE, **change))
    assert not right
    assert text in printed


def test_what_compiled_bodies_take():
    found = [Resources("one", 40, 0, 2048), Resources("two", 255, 16, 0), Resources("one", 64, 8, 1024)]
    assert check._spread(found) == ["one: 64, 8 B, 2 KiB", "two: 255, 16 B, 0 KiB"]


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch):
    for right, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(check, "check_all", lambda only, interpret, console, right=right: right)
        assert CliRunner().invoke(app, ["kernels", "check"]).exit_code == status


def test_an_unknown_name():
    result = CliRunner().invoke(app, ["kernels", "check", "--interpret", "--only", "x"])
    assert result.exit_code == 2
    assert f"there is no kernel 'x'; there are {', '.join(check.NAMES)}" in result.stderr


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["kernels", "check"])
    assert result.exit_code == 2
    assert "there is no GPU to check kernels on; --interpret runs them" in result.stderr


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch):
    cuda = {"is_available": lambda: True, "current_device": lambda: 7, "get_device_capability": lambda _: (7, 5)}
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with pytest.raises(Unsupported, match=r"compute capability 8\.0; this one has 7\.5"):
        check._gpu()


def test_without_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "has_triton", lambda: False)
    with pytest.raises(Unsupported, match="install triton"):
        check.check_all(None, interpret=True, console=Console())


def test_resources_are_those_of_all_specialisations(monkeypatch: pytest.MonkeyPatch):
    from lazyio.kernels.contract import resources

    def compiled(registers: int) -> SimpleNamespace:
        return SimpleNamespace(n_regs=registers, n_spills=4, metadata=SimpleNamespace(shared=512))

    body = SimpleNamespace(__name__="body", device_caches={1: ({"a": compiled(30), "b": compiled(60)}, {}, None)})
    found = resources(replace(DOUBLE, bodies=lambda: [body]), torch.device("cuda", 1))
    assert found == [Resources("body", 30, 16, 512), Resources("body", 60, 16, 512)]
