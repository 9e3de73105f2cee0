from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyio.bench.residency import PAGE_BYTES, PageRange, drop_pages, resident_in
from lazyio.engine.models import Model
from lazyio.engine.weights import load
from lazyio.engine.weights.folder import FolderSource
from lazyio.engine.weights.load import load_model, open_source, outline
from lazyio.engine.weights.reading import Landing
from lazyio.engine.weights.trunk import Trunk, plan_dummy, plan_trunk
from lazyio.errors import ModelError, NeverFits, SettingError, Unsupported
from lazyio.kernels.packed import PackedWeight, reference_dequantise
from lazyio.ple.safetensors import open_safetensors

Write = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

CPU = torch.device("cpu")
ARCHITECTURES = ["gemma3n", "gemma4", "qwen3_5", "qwen3_5_moe", "qwen4_exp"]


def loaded(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32, **more: Any) -> Model:
    source = open_source(path)
    return load_model(plan_trunk(source, outline(source), device=CPU, dtype=dtype), **more)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(model: Model, expected: Tensors, dtype: torch.dtype = torch.float32) -> None:
    for name, value in model.state_dict().items():
        assert value.dtype == (torch.float32 if name in model.float32 else dtype), name
        assert bits(value) == bits(expected[name].to(value.dtype)), name


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves(tmp_path: Path, tiny: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    reference = tiny(name).reference
    reference.to(dtype).save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = loaded(tmp_path, dtype)
    expected = reference.state_dict()
    left_out = {model.table, *(key for key in expected if expected[key].dtype == torch.int64)}
    assert model.state_dict().keys() == expected.keys() - left_out
    assert_same(model, expected, dtype)
    assert not model.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


@pytest.mark.parametrize("name", ["qwen4_exp", "gemma4"])
def test_the_text_model_inside_another(tmp_path: Path, tiny: Callable[..., Any], name: str) -> None:
    from safetensors.torch import save_file

    reference = tiny(name).reference
    expected = reference.state_dict()
    tensors = {
        key.replace("model.", "model.language_model.", 1): value.clone()
        for key, value in expected.items()
        if not (key == "lm_head.weight" and name == "gemma4")
    }
    save_file(tensors | {"model.visual.blocks.0.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    text = json.loads(reference.config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": text, "vision_config": {}}))
    assert_same(loaded(tmp_path), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_experts_and_some_parameters_in_float32(write: Write, weights: Tensors, dtype: torch.dtype) -> None:
    assert_same(loaded(write(weights), dtype), weights, dtype)


@pytest.mark.parametrize("together", [True, False])
def test_fp8(write: Write, weights: Tensors, together: bool) -> None:
    """Blocks for experts, a scale for each row of one matrix and one for all of another."""
    stored = dict(weights)
    expected = dict(weights)

    def quantise(name: str, *shape: int) -> torch.Tensor:
        value, scale = stored[name].to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
        stored[name], stored[f"{name}_scale{'_inv' if len(shape) == 3 else ''}"] = value, scale
        return value.float(), scale

    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        value, scale = quantise(name, 3, 4, 2)
        expected[name] = value * scale.repeat_interleave(12, 1).repeat_interleave(10, 2)[..., :16]
        if not together:
            del stored[name], stored[name + "_scale_inv"]
            for number in range(3):
                for place, which in enumerate(("gate", "up")):
                    one = f"model.layers.{layer}.mlp.experts.{number}.{which}_proj.weight"
                    stored[one] = weights[name].to(torch.float8_e4m3fn)[number, 24 * place : 24 * place + 24]
                    stored[one + "_scale_inv"] = scale[number, 2 * place : 2 * place + 2]
    for name, shape in (("lm_head.weight", (40, 1)), ("model.layers.0.mixer.proj.weight", (1,))):
        value, scale = quantise(name, *shape)
        expected[name] = value * scale
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [12, 10]}}
    folder = write(stored, config=json.loads((write({}) / "config.json").read_text()) | config)
    assert_same(loaded(folder), expected)
    assert_same(loaded(folder, torch.bfloat16), expected, torch.bfloat16)

    source = open_source(folder)
    trunk = plan_trunk(source, outline(source), device=CPU, dtype=torch.float32, weights="packed")
    load_model(trunk)
    kept = [name for name, form in trunk.forms.items() if form.packed]
    assert len(kept) == 4
    assert trunk.packed_types == ["F8_E4M3"]
    for name in kept:
        weight = trunk.model.weight(name)
        assert isinstance(weight, PackedWeight)
        assert torch.equal(reference_dequantise(weight), expected[name]), name


def test_fp8_whose_blocks_are_no_blocks_of_the_whole(write: Write, weights: Tensors) -> None:
    """Halves of 24 rows in blocks of 16: the second begins within a block of 16 of both."""
    stored, expected = dict(weights), dict(weights)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    both, scale = stored.pop(name).to(torch.float8_e4m3fn), torch.rand(3, 2, 2, 1) + 0.5
    expected[name] = torch.empty(both.shape)
    for number in range(3):
        for place, which in enumerate(("gate", "up")):
            half = slice(24 * place, 24 * place + 24)
            one = f"model.layers.0.mlp.experts.{number}.{which}_proj.weight"
            stored[one], stored[one + "_scale_inv"] = both[number, half], scale[number, place]
            expected[name][number, half] = (
                both[number, half].float() * scale[number, place].repeat_interleave(16, 0)[:24]
            )
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    source = open_source(write(stored, config=json.loads((write({}) / "config.json").read_text()) | config))
    trunk = plan_trunk(source, outline(source), device=CPU, dtype=torch.float32, weights="packed")
    assert_same(load_model(trunk), expected)
    assert trunk.forms[name].why == "F8_E4M3 (scales of which blocks are no blocks of the whole)"


def test_tied_parameters_are_one(write: Write, weights: Tensors) -> None:
    config = {"model_type": "small", "num_hidden_layers": 2, "tie_word_embeddings": True, "num_experts": 3}
    model = loaded(write(weights, config=config))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert_same(model, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


def test_progress_counts_the_bytes_that_are_read(write: Write, weights: Tensors, table: Tensors) -> None:
    told: list[tuple[int, int]] = []
    loaded(write(weights, table), progress=lambda done, everything: told.append((done, everything)))
    total = sum(tensor.nbytes for tensor in weights.values())
    assert {everything for _, everything in told} == {total}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (total, total)
    assert len(told) == len(weights)


# --- what is left behind ---------------------------------------------------------------------------------------------


@pytest.fixture
def large(write: Write, weights: Tensors, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of some MiB in two files, of which each has a table between its weights, all of it in memory."""
    monkeypatch.setattr(load, "Landing", lambda device: Landing(device, 1 << 18))
    small = load.model_class("small_text")

    def grown(config: Any) -> Model:
        model = small.from_config(config)
        for layer in model.get_submodule("model.layers"):
            layer.wide = torch.nn.Linear(1000, 1000, bias=False)
        return model

    monkeypatch.setattr(load, "model_class", lambda kind: type("Grown", (), {"from_config": staticmethod(grown)}))
    # safetensors puts tensors in the order of their names, those of the same type.
    files = ({}, {})
    for layer, file in enumerate(files):
        file[f"model.layers.{layer}.mid.embed_tokens_per_layer.shard_0.weight"] = torch.rand(3000, 100)
        file[f"model.layers.{layer}.wide.weight"] = torch.rand(1000, 1000)
    files[0].update(weights)
    folder = write(*files)
    for file in folder.glob("*.safetensors"):
        drop_pages(PageRange(str(file), 0, file.stat().st_size))
        file.read_bytes()
    return folder


def whole_pages(folder: Path, *, of_table: bool) -> list[PageRange]:
    """OS pages that hold nothing but bytes of one tensor of a table, or of one of weights."""
    checkpoint = open_safetensors(str(folder))
    found = []
    for name in checkpoint.names:
        tensor = checkpoint.tensor(name)
        assert tensor.size_bytes
        if ("embed_tokens_per_layer" in name) == of_table:
            start = -(-tensor.offset // PAGE_BYTES) * PAGE_BYTES
            stop = (tensor.offset + tensor.size_bytes) // PAGE_BYTES * PAGE_BYTES
            if start < stop:
                found.append(PageRange(tensor.path, start, stop))
    return found


def test_weights_leave_the_page_cache_and_the_table_stays(large: Path) -> None:
    weights, table = (whole_pages(large, of_table=of_table) for of_table in (False, True))
    assert sum(map(resident_in, weights)) == sum(found.pages for found in weights) > 1900
    model = loaded(large)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert sum(map(resident_in, weights)) == 0
    assert sum(map(resident_in, table)) == sum(found.pages for found in table) > 500


def test_the_table_is_not_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def watched(number: int, views: list[memoryview], offset: int) -> int:
        read.append((os.readlink(f"/proc/self/fd/{number}"), offset, offset + len(views[0])))
        assert len(views[0]) <= 1 << 18
        return preadv(number, views, offset)

    monkeypatch.setattr(os, "preadv", watched)
    loaded(large)
    ranges = whole_pages(large, of_table=True)
    assert not any(
        path == found.path and start < found.stop and stop > found.start
        for path, start, stop in read
        for found in ranges
    )
    assert len(read) > 30


# --- what goes wrong -------------------------------------------------------------------------------------------------


def open_files() -> list[str]:
    return [
        os.readlink(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{number}")
    ]


def interfering(folder: Path, interfere: Callable[[Path], None], error: type[BaseException], match: str) -> None:
    """Load, and interfere with the second file once the first tensor was read."""
    second = folder / "part-1.safetensors"
    done: list[int] = []

    def progress(*_: int) -> None:
        done.append(1)
        if len(done) == 1:
            interfere(second)

    with pytest.raises(error, match=match):
        loaded(folder, progress=progress)
    assert done
    assert not [path for path in open_files() if str(folder) in path]


@pytest.fixture
def halves(write: Write, weights: Tensors) -> Path:
    names = list(weights)
    return write({name: weights[name] for name in names[::2]}, {name: weights[name] for name in names[1::2]})


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replaced(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def written_to(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(7, 7))


def test_a_file_that_vanishes(halves: Path) -> None:
    interfering(halves, Path.unlink, ModelError, r"can't open .*part-1\.safetensors: No such file.*was there when")


@pytest.mark.parametrize("interfere", [cut_short, replaced, written_to])
def test_a_file_that_changes(halves: Path, interfere: Callable[[Path], None]) -> None:
    interfering(halves, interfere, ModelError, r"part-1\.safetensors changed while the model was loaded")


def test_a_file_that_changes_while_it_is_read(halves: Path) -> None:
    def first(second: Path) -> None:
        os.utime(second.with_name("part-0.safetensors"), ns=(7, 7))

    interfering(halves, first, ModelError, r"part-0\.safetensors changed while the model was loaded")


def test_an_interrupt_leaves_nothing_open(halves: Path) -> None:
    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt("pressed")

    interfering(halves, interrupt, KeyboardInterrupt, "^pressed$")


def test_a_model_that_does_not_fit_is_not_begun(
    write: Write, weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = write(weights), []

    def refuse(trunk: Trunk, passing_bytes: int) -> None:
        asked.append((trunk.nbytes, passing_bytes > 0))
        raise NeverFits("too large")

    monkeypatch.setattr(load, "check_memory", refuse)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read before it was known to fit"))
    values = sum(tensor.numel() for tensor in weights.values())
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(NeverFits):
            loaded(folder, dtype)
    with pytest.raises(NeverFits):
        load_model(plan_dummy(outline(open_source(folder), "dummy"), device=CPU, dtype=torch.bfloat16))
    # A_log of the first layer, 2000 values, stays in float32.
    assert asked == [(4 * values, True), (2 * values + 4000, True), (2 * values + 4000, False)]


def test_arguments_that_can_not_be(write: Write, weights: Tensors) -> None:
    source = open_source(write(weights))
    with pytest.raises(SettingError, match="load_format is 'fast'; it can be auto or dummy"):
        outline(source, "fast")
    with pytest.raises(SettingError, match="layers is 1, and only a model with load_format 'dummy' can"):
        outline(source, layers=1)
    model, absent = outline(source), torch.device("cuda", 99)
    for planned in (
        lambda: plan_trunk(source, model, device=CPU, dtype=torch.float64),
        lambda: plan_dummy(model, device=CPU, dtype=torch.float64),
    ):
        with pytest.raises(SettingError, match=r"dtype is torch\.float64; it can be torch\.float32, "):
            planned()
    for planned in (
        lambda: plan_trunk(source, model, device=absent, dtype=torch.float32),
        lambda: load_model(plan_dummy(model, device=absent, dtype=torch.float32)),
    ):
        with pytest.raises(Unsupported, match=r"device is 'cuda:99', and torch sees [0-9]+ CUDA devices here"):
            planned()


def test_another_architecture(write: Write) -> None:
    with pytest.raises(ModelError, match="'clip' is an architecture that can't be run here; these can: gemma3n, "):
        outline(open_source(write(config={"model_type": "clip"})))


def test_formats_by_what_the_path_is(write: Write, weights: Tensors, tmp_path: Path) -> None:
    folder = write(weights)
    for path in (folder, str(folder), folder / "part-0.safetensors"):
        assert isinstance(open_source(path), FolderSource)
    with pytest.raises(ValueError, match=r"missing\.gguf"):
        open_source(tmp_path / "missing.gguf")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device(write: Write, weights: Tensors, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "Landing", lambda device: Landing(device, 1 << 14))
    source = open_source(write(weights))
    model = load_model(plan_trunk(source, outline(source), device=torch.device("cuda"), dtype=dtype))
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert_same(model, weights, dtype)
