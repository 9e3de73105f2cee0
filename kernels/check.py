"""`lazyio kernels check`: every kernel beside its reference, and every planted fault seen."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lazyio.errors import SettingError, Unsupported
from lazyio.kernels.contract import Case, Kernel, Resources, error_of, has_triton, interpreted, resources, usable

#: Modules of this folder that have a KERNEL.
NAMES = (
    "block_selection",
    "delta_net",
    "expand_rows",
    "gated_delta_rule",
    "hyper_connection",
    "moe",
    "norm_rotate",
    "packed_matmul",
    "paged_attention",
    "ple_block",
    "route",
    "sparse_attention",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found out about one kernel."""

    name: str
    errors: dict[str, tuple[float, float]]  # of each case: the error and its bound
    red: int
    planted: int
    wrong: tuple[str, ...]  # in words
    resources: tuple[Resources, ...]


def load(only: str | None = None) -> list[Kernel[Any]]:
    """All kernels, or the one of this name. Raises SettingError for a name that none has."""
    if only is not None and only not in NAMES:
        raise SettingError(f"there is no kernel {only!r}; there are {', '.join(NAMES)}")
    return [importlib.import_module(f"lazyio.kernels.{name}").KERNEL for name in NAMES if only in (None, name)]


def check(kernel: Kernel[Any], device: torch.device, seed: int = 0) -> Finding:
    """Run all cases of a kernel that its bodies can run on this device, and all its controls."""
    errors, wrong, reds = {}, [], []
    for case in kernel.cases:
        if case.compiled_only and device.type == "cpu":
            continue
        error, seen, said = _check_case(kernel, case, device, seed)
        errors[case.name] = (error, case.within)
        reds += seen
        wrong += said
    of_gpu = tuple(resources(kernel, device)) if device.type == "cuda" else ()
    return Finding(kernel.name, errors, sum(reds), len(reds), tuple(wrong), of_gpu)


def _check_case(
    kernel: Kernel[Any], case: Case[Any], device: torch.device, seed: int
) -> tuple[float, list[bool], list[str]]:
    """The error of a case, which controls were seen in it, and what is wrong."""
    given = case.make(device, seed)
    try:
        expected = kernel.reference(given)
        error = error_of(kernel.run(given), expected, case.within)
        controls = kernel.controls if case.planted else {}
        seen = {
            name: error_of(kernel.run(fault(given)), expected, case.within) > case.within
            for name, fault in controls.items()
        }
    except Exception as failure:  # one kernel that can't run says nothing about the others
        return math.inf, [], [f"{case.name}: {type(failure).__name__}: {failure}"]
    said = [f"{case.name}: the error is {error:.2g}, the bound {case.within:.2g}"] if error > case.within else []
    said += [f"{case.name}: the fault {name!r} is not seen" for name, red in seen.items() if not red]
    return error, list(seen.values()), said


def check_all(only: str | None, interpret: bool, console: Console) -> bool:
    """Check kernels on the GPU, or in Triton's interpreter, print a table, and tell whether all was right.

    Raises Unsupported without Triton, and without a GPU unless interpreted; SettingError for an unknown name.
    """
    kernels = load(only)
    if not has_triton():
        raise Unsupported("kernels can't be checked without Triton: install triton")
    if interpret:
        with interpreted(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of overflows
            findings = [check(kernel, torch.device("cpu")) for kernel in kernels]
    else:
        findings = [check(kernel, _gpu()) for kernel in kernels]
    _show(findings, console)
    return not any(finding.wrong for finding in findings)


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise Unsupported("there is no GPU to check kernels on; --interpret runs them in Triton's interpreter")
    device = torch.device("cuda", torch.cuda.current_device())
    if not usable(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise Unsupported(f"kernels need a GPU of compute capability 8.0; this one has {major}.{minor}")
    return device


def _show(findings: Sequence[Finding], console: Console) -> None:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column("kernel", no_wrap=True)
    for heading in ("cases passed", "worst error", "controls red"):
        grid.add_column(heading, justify="right")
    grid.add_column("body: registers, spilled, shared memory")
    for finding in findings:
        passed = sum(error <= bound for error, bound in finding.errors.values())
        grid.add_row(
            finding.name,
            f"{passed} of {len(finding.errors)}",
            _worst(finding),
            f"{finding.red} of {finding.planted}",
            "\n".join(_spread(finding.resources)) or "not compiled",
        )
    console.print(grid)
    for finding in findings:
        for text in finding.wrong:
            console.print(f"{finding.name}, {text}", style="red", markup=False)


def _worst(finding: Finding) -> str:
    """The error nearest to its bound."""
    error, bound = max(finding.errors.values(), key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])
    return f"{error:.2g} of {bound:.2g}" if bound else "none" if error == 0 else "bits differ"


def _spread(compiled: Sequence[Resources]) -> list[str]:
    """A line for each body, with the most that one of its specialisations takes."""
    lines = []
    for body in dict.fromkeys(one.body for one in compiled):
        some = [one for one in compiled if one.body == body]
        registers, spilled = max(one.registers for one in some), max(one.spilled_bytes for one in some)
        lines.append(f"{body}: {registers}, {spilled} B, {max(one.shared_bytes for one in some) / 1024:.0f} KiB")
    return lines
