from __future__ import annotations

import pytest
import torch

from lazyio.engine.weights import memory
from lazyio.engine.weights.memory import check_memory
from lazyio.errors import NeverFits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB left on the host, 16 GiB on the device: 12 free, 4 that torch holds and doesn't use."""
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * GIB)


def test_what_fits() -> None:
    check_memory(7 * GIB, 1 * GIB, CPU, torch.float32)
    check_memory(15 * GIB, 1 * GIB, CUDA, torch.float32)


def test_weights_that_do_not_fit_the_host() -> None:
    with pytest.raises(NeverFits) as caught:
        check_memory(7 * GIB, GIB + 1, CPU, torch.float32)
    assert str(caught.value) == (
        "the model needs 8.0 GiB on the host (7.0 GiB for weights as float32, 1.0 GiB while they are loaded), which "
        "has 8.0 GiB left; free some of it, or use dtype bfloat16, which takes half, or a host with more memory"
    )
    with pytest.raises(NeverFits, match=r"free some of it, or use a host with more memory$"):
        check_memory(9 * GIB, 0, CPU, torch.float16)


def test_weights_that_do_not_fit_the_device() -> None:
    with pytest.raises(NeverFits, match=r"16\.1 GiB on device cuda:1 .* has 16\.0 GiB left"):
        check_memory(16 * GIB, GIB // 8, CUDA, torch.bfloat16)


def test_loading_that_does_not_fit_the_host_of_a_device() -> None:
    with pytest.raises(NeverFits, match=r"9\.0 GiB on the host .*9\.0 GiB while they are loaded"):
        check_memory(GIB, 9 * GIB, CUDA, torch.float32)
