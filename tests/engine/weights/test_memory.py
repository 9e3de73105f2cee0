from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lazyio.engine.models import Model
from lazyio.engine.weights import memory
from lazyio.engine.weights.memory import check_memory
from lazyio.engine.weights.trunk import Form, Trunk
from lazyio.errors import NeverFits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB left on the host, 16 GiB on the device: 12 free, 4 that torch holds and doesn't use."""
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "lack_of", lambda device: "")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * GIB)


def trunk(device: torch.device, dtype: torch.dtype, *forms: Form, note: str = "") -> Trunk:
    of_model = cast(Model, nn.Module())
    return Trunk(of_model, device, dtype, {str(number): form for number, form in enumerate(forms)}, (), note)


def values(device: torch.device, dtype: torch.dtype, size_bytes: int, **more: Any) -> Trunk:
    return trunk(device, dtype, Form((size_bytes // dtype.itemsize,), dtype, **more))


def test_what_fits() -> None:
    check_memory(values(CPU, torch.float32, 7 * GIB), 1 * GIB)
    check_memory(values(CUDA, torch.float32, 15 * GIB), 1 * GIB)


def test_weights_that_do_not_fit_the_host() -> None:
    with pytest.raises(NeverFits) as caught:
        check_memory(values(CPU, torch.float32, 7 * GIB), GIB + 1)
    assert str(caught.value) == (
        "the model needs 8.0 GiB on the host (for weights 7.0 GiB of float32, 1.0 GiB while they are loaded), which "
        "has 8.0 GiB left; free some of it, or use dtype bfloat16, or a host with more memory"
    )
    with pytest.raises(NeverFits, match=r"free some of it, or use a host with more memory$"):
        check_memory(values(CPU, torch.float16, 9 * GIB), 0)


def test_weights_that_do_not_fit_the_device() -> None:
    with pytest.raises(NeverFits, match=r"16\.1 GiB on device cuda:1 .* has 16\.0 GiB left"):
        check_memory(values(CUDA, torch.bfloat16, 16 * GIB), GIB // 8)


def test_loading_that_does_not_fit_the_host_of_a_device() -> None:
    with pytest.raises(NeverFits, match=r"loading the model takes 9\.0 GiB on the host .* has 8\.0 GiB left"):
        check_memory(values(CUDA, torch.float32, GIB), 9 * GIB)


def test_values_of_the_largest_packed_matrix_are_counted_on_a_gpu() -> None:
    matrix, experts = (1 << 15, 1 << 15), (8, 1 << 15, 1 << 15)
    forms = Form(matrix, torch.bfloat16, "Q8_0"), Form(experts, torch.bfloat16, "Q4_0")
    # 2^30 values of Q8_0, and 2^33 of Q4_0 that are never expanded as a whole.
    packed = 34 / 32 * GIB + 8 * 18 / 32 * GIB
    assert trunk(CPU, torch.bfloat16, *forms).nbytes == packed
    assert trunk(CUDA, torch.bfloat16, *forms).nbytes == packed + 2 * GIB
    fits = 16 * GIB - int(packed) - 2 * GIB
    check_memory(trunk(CUDA, torch.bfloat16, *forms), min(fits, 8 * GIB))
    with pytest.raises(NeverFits, match=r"packed as Q4_0, Q8_0 and 10\.0 GiB of bfloat16, 2\.0 GiB to expand the"):
        check_memory(trunk(CUDA, torch.bfloat16, *forms, Form((5 * GIB,), torch.bfloat16)), 0)


def test_a_type_without_a_kernel_that_is_too_large_once_expanded() -> None:
    with pytest.raises(NeverFits) as caught:
        check_memory(values(CUDA, torch.bfloat16, 17 * GIB, why="Q3_K (no kernel)", stored_bytes=4 * GIB), 0)
    assert "17.0 GiB of bfloat16, of which converted: 4.0 GiB of Q3_K (no kernel) to 17.0 GiB" in str(caught.value)
    assert "or use a file of types that need not be expanded: F8_E4M3, IQ4_NL, Q4_0, " in str(caught.value)


@pytest.mark.parametrize(("lack", "said"), [("", "weights packed, or another device"), ("no Triton", "another device")])
def test_weights_that_would_fit_packed(monkeypatch: pytest.MonkeyPatch, lack: str, said: str) -> None:
    monkeypatch.setattr(memory, "lack_of", lambda device: lack)
    with pytest.raises(NeverFits, match=f"free some of it, or use {said}$"):
        check_memory(trunk(CUDA, torch.bfloat16, Form((9 * GIB,), torch.bfloat16), note="as asked"), 0)


def test_a_smaller_dtype_is_no_help_where_most_is_packed() -> None:
    forms = Form((16, 1 << 30), torch.float32, "Q8_0"), Form((GIB,), torch.float32)
    with pytest.raises(NeverFits, match=r"free some of it, or use a host with more memory$"):
        check_memory(trunk(CPU, torch.float32, *forms), 0)


def test_random_weights_that_do_not_fit() -> None:
    large = trunk(CPU, torch.bfloat16, Form((9 * GIB,), torch.bfloat16))
    with pytest.raises(NeverFits, match=r"use trunk Q4_0, or fewer layers, or a host with more memory$"):
        check_memory(replace(large, steps=None), 0)
    packed = trunk(CPU, torch.bfloat16, Form((32, 1 << 30), torch.bfloat16, "Q4_0"))
    with pytest.raises(NeverFits, match=r"free some of it, or use fewer layers, or a host with more memory$"):
        check_memory(replace(packed, steps=None), 0)
