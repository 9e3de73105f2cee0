from __future__ import annotations

import math

import pytest
import torch

from lazyio.errors import Unsupported
from lazyio.kernels import contract
from lazyio.kernels.contract import error_of

ONE = torch.tensor([3.0, 4.0])


def test_the_error_is_relative_to_the_norm_and_the_largest_of_all_results():
    assert error_of([ONE + torch.tensor([0.0, 0.5])], [ONE], 1e-3) == pytest.approx(0.1)
    assert error_of([ONE, ONE], [ONE, ONE * 2], 1e-3) == pytest.approx(0.5)
    assert error_of([ONE], [ONE.double()], 1e-3) == 0


@pytest.mark.parametrize("within", [0.0, 1e-3])
def test_what_can_not_be_compared_is_wrong(within: float):
    assert error_of([ONE], [], within) == math.inf
    assert error_of([ONE], [ONE[None]], within) == math.inf
    assert error_of([ONE * math.nan], [ONE], within) == math.inf


def test_without_a_bound_all_bits_count():
    zeros = torch.tensor([0.0, math.nan])
    assert error_of([zeros], [zeros.clone()], 0.0) == 0
    assert error_of([-zeros], [zeros], 0.0) == math.inf
    assert error_of([ONE], [ONE.double()], 0.0) == math.inf
    assert error_of([torch.nextafter(ONE, 2 * ONE)], [ONE], 0.0) == math.inf


def test_a_kernel_without_triton_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "lazyio.kernels.row_bodies", None)
    with pytest.raises(Unsupported, match=r"^the kernel of x needs Triton, which can't be imported \(.*\): install"):
        contract.bodies("row_bodies", "the kernel of x")


def test_no_kernel_is_launched_on_a_cpu_unless_it_is_asked_for():
    assert not contract.usable(torch.device("cpu"))


def test_interpreted_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch):
    import os

    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        else:
            monkeypatch.setenv("TRITON_INTERPRET", before)
        with contract.interpreted():
            assert os.environ["TRITON_INTERPRET"] == "1"
        assert os.environ.get("TRITON_INTERPRET") == before
