"""Which weights stay packed: what that gives, and what it takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyio.engine import LLM
from lazyio.engine.layers.moe import SparseMoe
from lazyio.engine.models import Model
from lazyio.engine.opening import plan_weights
from lazyio.engine.synthetic import plan_model, write_folder, write_gguf
from lazyio.engine.weights import trunk as trunk_module
from lazyio.engine.weights.load import load_model, open_source, outline
from lazyio.engine.weights.source import Part
from lazyio.engine.weights.trunk import Trunk, plan_dummy, plan_trunk
from lazyio.errors import ModelError, SettingError, Unsupported
from lazyio.forms import TRUNK_TYPES
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, random, reference_dequantise
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.gguf import open_gguf
from lazyio.units import format_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ARCHITECTURES = ["gemma3n", "gemma4", "qwen3_5", "qwen3_5_moe", "qwen4_exp"]
TOKENS = list(range(5, 40))

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(architecture, type)`: a GGUF file with matrices of that type."""
    folder, known = tmp_path_factory.mktemp("models"), dict[tuple[str, str], Path]()

    def make(architecture: str, stored: str) -> Path:
        key = architecture, stored
        if key not in known:
            plan = plan_model(architecture)
            known[key] = write_gguf(plan, folder / f"{architecture}-{stored}.gguf", trunk=stored, table="Q4_0")[0]
        return known[key]

    return make


def planned(path: Path, weights: str = "packed", device: torch.device = CPU) -> Trunk:
    source = open_source(path)
    return plan_trunk(source, outline(source), device=device, dtype=torch.float32, weights=weights)


def outline_of(architecture: str, size: str = "tiny") -> Model:
    return plan_model(architecture, size).model


def weights_of(trunk: Trunk) -> dict[str, torch.Tensor | PackedWeight]:
    return {name: trunk.model.weight(name) for name in trunk.forms}


def expand(trunk: Trunk) -> None:
    """Have a model hold the values of its packed weights in their place."""
    for name, weight in weights_of(trunk).items():
        if isinstance(weight, PackedWeight):
            each = [weight[expert] for expert in range(weight.shape[0])] if len(weight.shape) == 3 else [weight]
            values = torch.stack(list(map(reference_dequantise, each))).view(weight.shape)
            trunk.put(name, torch.nn.Parameter(values, requires_grad=False))


# --- packed and dequantised give the same ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_dequantised_weights(made: Made, agree: Callable[..., None], architecture: str) -> None:
    path, found = made(architecture, "Q4_0"), {}
    for weights in ("packed", "dequantised"):
        with LLM(path, weights=weights, device="cpu") as llm:
            assert bool(llm.trunk.packed_types) == (weights == "packed")
            found[weights] = llm.logits(TOKENS, cuts=[20, 14, 1])
    agree(found["packed"], found["dequantised"])


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_type(made: Made, agree: Callable[..., None], stored: str) -> None:
    path, found = made("qwen4_exp", stored), []
    for weights in ("packed", "dequantised"):
        with LLM(path, weights=weights, device="cpu") as llm:
            found.append(llm.logits(TOKENS))
            assert llm.trunk.packed_types == ([stored] if weights == "packed" else [])
    agree(*found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_has_the_values_of_its_file(made: Made, architecture: str) -> None:
    path = made(architecture, "Q5_1")
    packed, dense = (planned(path, weights) for weights in ("packed", "dequantised"))
    load_model(packed)
    load_model(dense)
    expected = weights_of(dense)
    for name, found in weights_of(packed).items():
        values = reference_dequantise(found) if isinstance(found, PackedWeight) else found
        assert torch.equal(values, expected[name]), name
    kept = [name for name, form in packed.forms.items() if form.packed]
    assert {type(expected[name]) for name in kept} == {torch.nn.Parameter}
    assert not any(name.endswith(("mlp.gate.weight", "norm.weight", "A_log")) for name in kept)
    assert len(kept) > len(packed.forms) / 4


def test_a_file_under_another_name(made: Made, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-1f"
    blob.symlink_to(made("qwen4_exp", "Q4_0"))
    with LLM(blob, weights="packed", device="cpu") as llm:
        assert llm.no_text is None
        assert llm.trunk.packed_types == ["Q4_0"]


def test_the_head_and_the_embedding_of_one_tensor_are_one(made: Made) -> None:
    trunk = planned(made("gemma4", "Q4_0"))
    model = load_model(trunk)
    assert model.get_submodule("lm_head").weight is model.get_submodule("model.embed_tokens").weight
    assert model.dtype == torch.float32


def test_bytes_are_those_that_are_held(made: Made) -> None:
    for weights in ("packed", "dequantised"):
        trunk = planned(made("qwen4_exp", "Q4_0"), weights)
        assert load_model(trunk).weights_bytes == trunk.weights_bytes
        assert trunk.weights_bytes == sum(weight.nbytes for weight in weights_of(trunk).values())


def test_only_the_experts_that_are_chosen_are_touched() -> None:
    layer = SparseMoe(64, 6, 2, 32, 32)
    for parameter in layer.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    chosen = set(layer.gate(x)[0].topk(2).indices.tolist())
    for name in layer.experts.packs:
        weight = random("Q4_0", getattr(layer.experts, name).shape, CPU, torch.Generator().manual_seed(3), 0.1)
        for expert in set(range(6)) - chosen:
            weight[expert].planes[1].fill_(torch.nan)
        delattr(layer.experts, name)
        setattr(layer.experts, name, weight)
    assert layer(x).isfinite().all()
    getattr(layer.experts, name)[chosen.pop()].planes[1].fill_(torch.nan)
    assert layer(x).isnan().any()


# --- what can't stay as it is ----------------------------------------------------------------------------------------


def test_what_was_converted_is_said_with_its_bytes(made: Made) -> None:
    trunk = planned(made("qwen3_5", "Q4_0"))
    assert trunk.forms["model.layers.0.linear_attn.out_proj.weight"].why == "Q4_0 (columns in another order)"
    assert trunk.forms["model.layers.0.linear_attn.in_proj_a.weight"].why == "Q4_0 (a router, or few rows)"
    assert trunk.expanded()[1] == "6.8 KiB of Q4_0 (columns in another order) to 48.0 KiB"
    packed = sum(form.nbytes for form in trunk.forms.values() if form.packed)
    said = f"{format_bytes(packed)} packed as Q4_0 and 62.8 KiB of float32, of which converted: "
    assert str(trunk) == said + "; ".join(trunk.expanded())
    with LLM(made("qwen3_5", "Q4_0"), weights="packed", device="cpu") as llm:
        assert f"qwen3_5, {trunk} on cpu" in llm.summary()


def test_a_type_without_a_kernel_becomes_values(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk_module, "PACKED_TYPES", PACKED_TYPES - {"Q4_0"})
    trunk = planned(made("qwen3_5", "Q4_0"))
    assert not trunk.packed_types
    assert "Q4_0 (no kernel)" in str(trunk)


def test_on_the_cpu_weights_are_dequantised_unless_asked(made: Made) -> None:
    for weights, note in (("auto", "on the CPU that is faster"), ("dequantised", "as asked")):
        trunk = planned(made("qwen3_5", "Q4_0"), weights)
        assert not trunk.packed_types
        assert str(trunk).endswith(f"of float32, weights dequantised ({note})")
    assert str(planned(made("qwen3_5", "F32"), "auto")).endswith("of float32")


def test_a_gpu_that_kernels_can_not_run_on(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(trunk_module, "usable", lambda device: False)
    monkeypatch.setattr(trunk_module, "has_triton", lambda: True)
    lack = "cuda:0 has compute capability 7.5, and kernels need 8.0"
    assert str(planned(made("qwen3_5", "Q4_0"), "auto", CUDA)).endswith(f"weights dequantised ({lack})")
    with pytest.raises(Unsupported, match=f"packed weights need kernels .*: {lack}; set weights to dequantised"):
        planned(made("qwen3_5", "Q4_0"), "packed", CUDA)
    monkeypatch.setattr(trunk_module, "has_triton", lambda: False)
    with pytest.raises(Unsupported, match="Triton is not installed"):
        planned(made("qwen3_5", "Q4_0"), "packed", CUDA)


@pytest.mark.parametrize("parameter", ["blk.1.attn_qkv.weight", "blk.2.ffn_up_exps.weight"])
@pytest.mark.parametrize("bits", [0x7E00, 0x7C00])
def test_a_scale_that_is_no_number(made: Made, tmp_path: Path, parameter: str, bits: int) -> None:
    path = shutil.copy(made("qwen4_exp", "Q4_0"), tmp_path / "poisoned.gguf")
    tensor = open_gguf(str(path)).tensor(parameter)
    with open(path, "r+b") as file:
        file.seek(
            tensor.offset + 18 * (tensor.shape[-1] // 32) * (tensor.shape[-2] + 5 if len(tensor.shape) == 3 else 5)
        )
        file.write(np.uint16(bits).tobytes())
    of_expert = " of expert 1" if len(tensor.shape) == 3 else ""
    with pytest.raises(ModelError, match=rf"poisoned\.gguf: {parameter} .*, in row 5{of_expert}"):
        load_model(planned(path))


# --- random weights --------------------------------------------------------------------------------------------------


def test_types_are_those_that_kernels_have() -> None:
    assert set(TRUNK_TYPES) == PACKED_TYPES | {"BF16"}


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_random_weights_of_every_type(tmp_path: Path, agree: Callable[..., None], stored: str) -> None:
    write_folder(plan_model("qwen4_exp"), tmp_path / "model", with_trunk=False)
    with LLM(tmp_path / "model", load_format="dummy", trunk=stored, device="cpu") as llm:
        assert llm.trunk.packed_types
        logits = llm.logits(TOKENS)
        assert 0.1 < logits.std() < 10
        experts = llm.trunk.model.weight("model.layers.0.mlp.experts.gate_up_proj")
        assert abs(reference_dequantise(experts).std() / 64**-0.5 - 1) < 0.1
        expand(llm.trunk)
        agree(logits, llm.logits(TOKENS))


def test_rows_of_no_whole_blocks_have_what_a_quantiser_takes_instead() -> None:
    model = outline_of("qwen4_exp", "true")
    trunk = plan_dummy(model, device=CUDA, dtype=torch.bfloat16, trunk="Q4_K")
    assert trunk.packed_types == ["Q4_K", "Q5_0"]
    assert trunk.forms["model.layers.0.mlp.experts.gate_up_proj"].packed == "Q4_K"  # rows of 2560
    assert trunk.forms["model.layers.0.mlp.experts.down_proj"].packed == "Q5_0"  # rows of 640


def test_a_whole_model_of_true_size_fits_one_gpu() -> None:
    trunk = plan_dummy(outline_of("qwen4_exp", "true"), device=CUDA, dtype=torch.bfloat16, trunk="Q4_0")
    assert 64 << 30 < trunk.weights_bytes < 72 << 30
    assert trunk.scratch_bytes == 2 * 248_320 * 2560
    values = trunk.weights_bytes - sum(form.nbytes for form in trunk.forms.values() if form.packed)
    assert values < 1 << 29


def test_norms_and_routers_stay_values() -> None:
    trunk = plan_dummy(outline_of("qwen4_exp"), device=CPU, dtype=torch.float32, trunk="Q4_0")
    for name, form in trunk.forms.items():
        if name.endswith(("norm.weight", "mlp.gate.weight", "A_log", "dt_bias", "conv1d.weight")):
            assert form.packed is None, name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trunk": "Q4_0"}, "trunk is Q4_0, and only weights with load_format 'dummy' can be of any type"),
        ({"trunk": "Q3_K", "load_format": "dummy"}, "trunk is 'Q3_K'; it can be auto, BF16, F8_E4M3, "),
        ({"trunk": "Q3_K"}, "trunk is 'Q3_K'; it can be auto, BF16, F8_E4M3, "),
        (
            {"trunk": "BF16", "load_format": "dummy"},
            "trunk is BF16, and dtype is float32: set dtype to bfloat16, or leave trunk out",
        ),
        (
            {"trunk": "BF16", "dtype": "bfloat16", "weights": "packed", "load_format": "dummy"},
            "weights packed has no effect with load_format 'dummy' and trunk BF16: leave it out",
        ),
        (
            {"trunk": "q4_0", "weights": "dequantised", "load_format": "dummy"},
            "trunk is Q4_0, and weights is dequantised: leave one of them out",
        ),
        ({"weights": "packed", "load_format": "dummy"}, "weights packed has no effect with load_format 'dummy' and no"),
        ({"weights": "fast"}, "weights is 'fast'; it can be auto, packed or dequantised"),
    ],
)
def test_settings_that_contradict_each_other(made: Made, given: dict[str, str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        LLM(made("qwen3_5", "Q4_0"), device="cpu", **given)  # type: ignore[arg-type]


def test_settings_that_say_what_holds_anyway(made: Made) -> None:
    for given in ({"trunk": "auto"}, {"weights": "AUTO", "load_format": "dummy"}):
        with LLM(made("qwen3_5", "Q4_0"), device="cpu", **given) as llm:  # type: ignore[arg-type]
            assert not llm.trunk.packed_types


def test_packed_where_nothing_can_be(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made("qwen3_5", "BF16")
    with pytest.raises(SettingError, match=r"weights packed has no effect: .*BF16\.gguf has no matrix that can stay"):
        LLM(path, device="cpu", weights="packed")
    monkeypatch.setenv("LAZYIO_WEIGHTS", "packed")
    with LLM(path, device="cpu") as llm:
        assert not llm.trunk.packed_types


def test_a_gpu_that_can_not_have_random_weights_of_a_type(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk_module, "usable", lambda device: False)
    monkeypatch.setattr(trunk_module, "has_triton", lambda: False)
    source = open_source(made("qwen3_5", "Q4_0"))
    with pytest.raises(Unsupported, match="Triton is not installed; leave trunk out"):
        plan_weights(source, outline(source), CUDA, torch.bfloat16, "dummy", None, "Q4_0")


def test_parts_of_different_types_are_told_from_types_without_a_kernel() -> None:
    halves = [
        Part(StoredTensor(name, stored, (64, 64), "file", 0, 0), (slice(start, start + 64),))
        for name, stored, start in (("gate", "Q4_0", 0), ("up", "F16", 64))
    ]
    form = trunk_module._form((128, 64), halves, torch.float32, may=True)
    assert form.why == "F16, Q4_0 (parts of different types)"


def test_variables_that_have_no_effect_are_left_alone(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYIO_TRUNK", "Q4_0")
    monkeypatch.setenv("LAZYIO_WEIGHTS", "packed")
    with LLM(made("qwen3_5", "Q8_0"), device="cpu") as llm:
        assert llm.trunk.packed_types == ["Q8_0"]
    with LLM(made("qwen3_5", "Q8_0"), device="cpu", load_format="dummy") as llm:
        assert llm.trunk.packed_types == ["Q4_0"]


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gpu_keeps_weights_packed(made: Made, agree: Callable[..., None], architecture: str) -> None:
    found = []
    for weights, stays in (("auto", True), ("dequantised", False)):
        with LLM(made(architecture, "Q4_0"), weights=weights, device="cuda", dtype="float32") as llm:
            assert bool(llm.trunk.packed_types) == stays
            found.append(llm.logits(TOKENS, cuts=[20, 14, 1]))
    agree(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_random_weights_on_a_gpu(tmp_path: Path, agree: Callable[..., None], stored: str) -> None:
    """What the GPU makes of them is what the CPU makes of the same planes."""
    write_folder(plan_model("qwen3_5_moe"), tmp_path / "model", with_trunk=False)
    given = {"load_format": "dummy", "trunk": stored, "dtype": "float32"}
    with LLM(tmp_path / "model", device="cuda", **given) as llm:
        logits = llm.logits(TOKENS, cuts=[34, 1])
        weights = weights_of(llm.trunk)
    with LLM(tmp_path / "model", device="cpu", **given) as llm:
        for name, weight in weights.items():
            llm.trunk.put(
                name, torch.nn.Parameter(weight.cpu()) if isinstance(weight, torch.Tensor) else weight.to(CPU)
            )
        agree(llm.logits(TOKENS, cuts=[34, 1]), logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_at_true_width_on_a_gpu(tmp_path: Path, agree: Callable[..., None]) -> None:
    """Four layers of Flash-Next, packed and then as the values of the same planes: 45 GiB, so one type at a time."""
    write_folder(plan_model("qwen4_exp", "true", layers=4, rows=1_000_000), tmp_path / "model", with_trunk=False)
    for stored in ("Q4_0", "Q6_K", "F8_E4M3"):
        given = {"load_format": "dummy", "trunk": stored, "dtype": "float32"}
        with LLM(tmp_path / "model", device="cuda", **given) as llm:
            packed = llm.logits(TOKENS, cuts=[20, 14, 1])
            expand(llm.trunk)
            assert not any(isinstance(weight, PackedWeight) for weight in weights_of(llm.trunk).values())
            agree(packed, llm.logits(TOKENS, cuts=[20, 14, 1]))
