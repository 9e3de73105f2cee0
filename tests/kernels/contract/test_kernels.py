"""What every kernel passes: its cases, and faults that must be seen in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazyio.kernels import check
from lazyio.kernels.contract import Case, Kernel, error_of, resources

KERNELS = {kernel.name: kernel for kernel in check.load()}
CASES = [(kernel, case) for kernel in KERNELS.values() for case in kernel.cases]
FAULTS = [(kernel, fault) for kernel in KERNELS.values() for fault in kernel.controls]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter


def test_names_are_those_of_modules():
    assert tuple(KERNELS) == check.NAMES


@pytest.mark.parametrize(("kernel", "case"), CASES, ids=[f"{kernel.name}-{case.name}" for kernel, case in CASES])
def test_the_kernel_is_its_reference(kernel: Kernel[Any], case: Case[Any], device: torch.device):
    if case.compiled_only and device.type == "cpu":
        pytest.skip("not for the interpreter")
    given = case.make(device, 1)
    assert error_of(kernel.run(given), kernel.reference(given), case.within) <= case.within


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_cases_are_random_and_not_trivial(kernel: Kernel[Any]):
    for case in kernel.cases:
        if not case.compiled_only:
            one, again, other = (kernel.reference(case.make(torch.device("cpu"), seed)) for seed in (1, 1, 2))
            assert error_of(one, again, 0.0) == 0
            assert error_of(one, other, case.within) > case.within
            assert error_of([torch.zeros_like(x) for x in one], one, case.within) > case.within


@pytest.mark.parametrize(("kernel", "fault"), FAULTS, ids=[f"{kernel.name}-{fault}" for kernel, fault in FAULTS])
def test_faults_are_seen(kernel: Kernel[Any], fault: str, device: torch.device):
    planted = [case for case in kernel.cases if case.planted]
    assert planted
    for case in planted:
        given = case.make(device, 1)
        found = kernel.run(kernel.controls[fault](given))
        assert error_of(found, kernel.reference(given), case.within) > case.within, case.name


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_arguments_stay_as_they_are(kernel: Kernel[Any], device: torch.device):
    case = next(case for case in kernel.cases if case.planted)
    given = case.make(device, 1)
    first = kernel.run(given)
    kernel.reference(given)
    assert error_of(kernel.run(given), first, 0.0) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_what_bodies_take_is_read_from_the_compiled_ones(kernel: Kernel[Any]):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    for case in kernel.cases:
        if case.planted:
            kernel.run(case.make(device, 1))
    found = resources(kernel, device)
    assert found
    assert all(8 <= one.registers <= 255 for one in found)
