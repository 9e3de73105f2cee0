"""Weights that are multiplied by the same x lie in one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lazyio.engine.layers.packed import joined
from lazyio.engine.synthetic import plan_model
from lazyio.engine.weights.joining import memory
from lazyio.engine.weights.load import load_model
from lazyio.engine.weights.trunk import Form, Trunk, plan_dummy
from lazyio.kernels.packed import PackedWeight, reference_dequantise

CPU = torch.device("cpu")
MATRICES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def planned(trunk: str = "Q4_0", architecture: str = "qwen4_exp") -> Trunk:
    model = plan_model(architecture, "tiny").model
    return plan_dummy(model, device=CPU, dtype=torch.float32, weights="packed", trunk=trunk)


def runs_of(trunk: Trunk, names: Sequence[str]) -> list[list[int]]:
    return [outputs for _, outputs in joined([trunk.model.weight(name) for name in names])]


@pytest.mark.parametrize("architecture", ["qwen4_exp", "qwen3_5_moe", "gemma4"])
def test_together_they_take_what_their_forms_say(architecture: str):
    trunk = planned(architecture=architecture)
    found = dict(memory(trunk))
    assert found.keys() == trunk.forms.keys()
    for name, form in trunk.forms.items():
        assert (tuple(found[name].shape), found[name].nbytes) == (form.shape, form.nbytes), name
    planes = [plane for one in found.values() if isinstance(one, PackedWeight) for plane in one.planes]
    storages = {plane.untyped_storage().data_ptr(): plane.untyped_storage().nbytes() for plane in planes}
    assert sum(storages.values()) == trunk.packed_bytes
    assert len(storages) < len(planes)
    assert all(plane.data_ptr() % 16 == 0 for plane in planes)


def test_what_takes_the_same_x_is_one_weight():
    trunk = planned()
    load_model(trunk)
    assert all(len(runs_of(trunk, names)) < len(names) for names in trunk.model.joined)
    names = [f"model.layers.0.linear_attn.{name}.weight" for name in MATRICES]
    assert names in trunk.model.joined
    (whole, outputs), *few_rows = joined([trunk.model.weight(name) for name in names])
    assert outputs == [trunk.forms[name].shape[0] for name in names[:2]]
    assert all(isinstance(one, torch.Tensor) for one, _ in few_rows)
    assert isinstance(whole, PackedWeight)
    for name, part in zip(names[:2], reference_dequantise(whole).split(outputs), strict=True):
        weight = trunk.model.weight(name)
        assert isinstance(weight, PackedWeight)
        assert torch.equal(part, reference_dequantise(weight))


def form(rows: int, stored: str | None = "Q4_0", inputs: int = 256, block: tuple[int, int] | None = None) -> Form:
    return Form((rows, inputs), torch.float32, stored, block)


@pytest.mark.parametrize(
    ("forms", "together"),
    [
        ([form(16), form(24), form(32), form(16)], [[16, 24, 32, 16]]),
        ([form(16), form(24, "Q6_K"), form(32, "Q6_K"), form(16)], [[16], [24, 32], [16]]),
        ([form(16), form(24, None), form(32, None), form(16)], [[16], [24], [32], [16]]),
        ([form(16), form(24), form(32, inputs=512), form(16, inputs=512)], [[16, 24], [32, 16]]),
        ([form(17, inputs=32), form(24, inputs=32), form(16, inputs=32), form(16)], [[17], [24, 16], [16]]),
        ([form(16, "F8_E4M3", 512, (16, 128)) for _ in range(4)], [[16] * 4]),
        ([form(24, "F8_E4M3", 512, (16, 128)) for _ in range(4)], [[24]] * 4),
    ],
    ids=["all", "types", "values", "inputs", "alignment", "fp8", "within a block of scales"],
)
def test_which_lie_together(forms: Sequence[Form], together: list[list[int]]):
    trunk = planned()
    names = [f"model.layers.0.linear_attn.{name}.weight" for name in MATRICES]
    changed = {**trunk.forms, **dict(zip(names, forms, strict=True))}
    found = dict(memory(Trunk(trunk.model, CPU, torch.float32, changed, None)))
    assert [outputs for _, outputs in joined([found[name] for name in names])] == together


def test_copies_lie_apart():
    trunk = planned()
    names = trunk.model.joined[0]
    whole = [one for name, one in memory(trunk) if name in names and isinstance(one, PackedWeight)]
    apart = [replace(one, planes=tuple(plane.clone() for plane in one.planes)) for one in whole]
    assert len(joined(whole)) == 1
    assert len(joined(apart)) == len(apart)
