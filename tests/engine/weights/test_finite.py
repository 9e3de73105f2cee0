"""Damaged blocks are found, and told by tensor and row, whether weights stay packed or become values."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyio.engine.synthetic.rows import Rows
from lazyio.engine.weights import finite
from lazyio.engine.weights.filling import fill, fill_packed
from lazyio.engine.weights.finite import check_packed, check_values
from lazyio.engine.weights.fp8 import block_scale
from lazyio.engine.weights.load import load_model, open_source, outline
from lazyio.engine.weights.reading import FileOnce, Landing, identity_of
from lazyio.engine.weights.source import Part
from lazyio.engine.weights.trunk import plan_trunk
from lazyio.errors import ModelError
from lazyio.kernels.packed import PACKED_TYPES, empty, random
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.dtypes import TYPES
from lazyio.ple.safetensors import open_safetensors

CPU = torch.device("cpu")
SHAPE = (3, 40, 512)
# Where blocks have their float16, in bytes.
SCALES = [
    *(("Q8_0", 0), ("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("Q5_0", 0), ("Q5_1", 0), ("Q5_1", 2), ("IQ4_NL", 0)),
    *(("Q4_K", 0), ("Q4_K", 2), ("Q5_K", 0), ("Q5_K", 2), ("Q6_K", 208)),
]


def load(part: Part, *, packed: bool) -> None:
    path, shape = part.stored.path, part.stored.shape
    with Landing(CPU, 16_384) as landing, FileOnce(path, identity_of(path)) as file:
        if packed:
            block = None if part.scale is None else part.scale.block
            fill_packed(empty(part.stored.dtype, shape, CPU, block), part, file, landing)
        else:
            fill(torch.empty(shape), part, file, landing)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("stored", "place"), SCALES)
def test_a_scale_of_gguf(tmp_path: Path, stored: str, place: int, number: float, packed: bool) -> None:
    blocks = np.empty((3 * 40, TYPES[stored].row_bytes(512)), np.uint8)
    Rows(stored, 512, seed=3).fill(0, blocks)
    path = tmp_path / "file"
    part = Part(StoredTensor("blk.0.ffn_up_exps.weight", stored, SHAPE, str(path), 0, blocks.nbytes))
    path.write_bytes(blocks.tobytes())
    load(part, packed=packed)
    start = TYPES[stored].block_bytes + place
    blocks[2 * 40 + 31, start : start + 2] = np.array([number], np.float16).view(np.uint8)
    path.write_bytes(blocks.tobytes())
    said = rf"file: blk.0.ffn_up_exps.weight \({stored} \[3, 40, 512\]\) has a .* that is .*, in row 31 of expert 2:"
    with pytest.raises(ModelError, match=said):
        load(part, packed=packed)


@pytest.mark.parametrize("packed", [True, False])
def test_fp8(write: Callable[..., Path], packed: bool) -> None:
    values = torch.zeros(300, 200).to(torch.float8_e4m3fn)
    scales = torch.ones(3, 2)

    def loaded() -> None:
        checkpoint = open_safetensors(str(write({"weight": values, "scale": scales})))
        weight = checkpoint.tensor("weight")
        load(Part(weight, scale=block_scale(weight, checkpoint.tensor("scale"), (128, 128))), packed=packed)

    loaded()
    scales[2, 0] = math.nan
    with pytest.raises(ModelError, match="that is nan, in row 256:"):
        loaded()
    scales[2, 0] = 1
    values.view(torch.uint8)[299, 150] = 0xFF
    with pytest.raises(ModelError, match=r"weight \(F8_E4M3 \[300, 200\]\) has a value that is nan, in row 299:"):
        loaded()


def test_fp8_of_many_rows() -> None:
    weight = random("F8_E4M3", (2, 30_000, 40), CPU, torch.Generator().manual_seed(0), 0.02)
    check_packed(weight, "w")
    weight.planes[0].view(torch.uint8)[1, 20_000, 3] = 0xFF
    with pytest.raises(ModelError, match="a value that is nan, in row 20000 of expert 1:"):
        check_packed(weight, "w")


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_random_weights_are_finite(stored: str) -> None:
    check_packed(random(stored, (2, 64, 1024), CPU, torch.Generator().manual_seed(0), 0.02), "w")


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> None:
    source = open_source(path)
    load_model(plan_trunk(source, outline(source), device=CPU, dtype=dtype))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("model.layers.0.centred.weight", 999, r"\[1000\]\) has a value that is [a-z-]+: "),
        ("model.layers.1.mixer.A_log", 0, r"\[2000\]\) has a value that is [a-z-]+: "),
        ("model.layers.1.mixer.conv1d.weight", 9, r"\[24, 1, 4\]\) has a value that is [a-z-]+, in row 2: "),
        ("model.layers.0.mixer.proj.weight", 16, r"\[24, 16\]\) has a value that is [a-z-]+, in row 1: "),
        ("model.layers.0.mlp.experts.down_proj", 16 * 24 + 24, r"24\]\) has a value .*, in row 1 of expert 1: "),
        ("model.embed_tokens.weight", 639, r"\[40, 16\]\) has a value that is [a-z-]+, in row 39: "),
    ],
)
def test_values_as_they_are(
    write: Callable[..., Path],
    weights: dict[str, torch.Tensor],
    name: str,
    place: int,
    said: str,
    stored: torch.dtype,
    number: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finite, "_VALUES_AT_ONCE", 100)
    monkeypatch.setattr(finite, "_FEW_VALUES", 7)
    tensors = {each: value.to(stored) for each, value in weights.items()}
    loaded(write(tensors))
    tensors[name].view(-1)[place] = number
    with pytest.raises(ModelError, match=f"part-0.safetensors: {name} .*{said}the file is damaged"):
        loaded(write(tensors))


def test_one_of_many_experts(write: Callable[..., Path], weights: dict[str, torch.Tensor]) -> None:
    """Which are tensors of their own, and halves of a parameter."""
    experts = weights.pop("model.layers.1.mlp.experts.gate_up_proj")
    for i, expert in enumerate(experts):
        for which, half in zip(("gate", "up"), expert.chunk(2), strict=True):
            weights[f"model.layers.1.mlp.experts.{i}.{which}_proj.weight"] = half
    for i, expert in enumerate(weights.pop("model.layers.1.mlp.experts.down_proj")):
        weights[f"model.layers.1.mlp.experts.{i}.down_proj.weight"] = expert
    loaded(write(weights))
    weights["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = math.nan
    with pytest.raises(ModelError, match=r"experts.2.up_proj.weight \(F32 \[24, 16\]\) .* that is nan, in row 3: "):
        loaded(write(weights))


def test_values_that_the_dtype_does_not_hold(write: Callable[..., Path], weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.norm.weight"][5] = 1e5
    loaded(write(weights), torch.bfloat16)
    with pytest.raises(
        ModelError, match=r"norm.weight \(F32 \[1000\]\) .* float16 does not hold: set dtype to bfloat16"
    ):
        loaded(write(weights), torch.float16)


@pytest.mark.parametrize("name", ["qwen4_exp-Q4_0", "gemma4-Q8_0"])
def test_values_as_they_are_in_gguf(name: str, tmp_path: Path) -> None:
    """One tensor of each kind, in parts of a file, changed on the way or not."""
    for path in (Path(__file__).parents[2] / "data" / "gguf").glob(f"{name}*.gguf"):
        shutil.copy(path, tmp_path)
    first = min(tmp_path.iterdir())
    source = open_source(first)
    steps = plan_trunk(source, outline(source), device=CPU, dtype=torch.float32).steps or ()
    plain = {"F32": np.float32, "F16": np.float16}
    some = {step.part.stored.name.rpartition("blk.")[2].lstrip("0123456789"): step.part.stored for step in steps}
    some = {kind: stored for kind, stored in some.items() if stored.dtype in plain}
    assert len(some) > 5
    for stored in some.values():
        with open(stored.path, "r+b") as file:
            file.seek(stored.offset)
            before = file.read(4)
            file.seek(stored.offset)
            file.write(plain[stored.dtype](math.nan).tobytes())
            file.flush()
            with pytest.raises(
                ModelError, match=rf"{stored.name} \({stored.dtype} .* that is nan.* the file is damaged"
            ):
                loaded(first)
            file.seek(stored.offset)
            file.write(before)
    loaded(first)


def test_rows_are_counted_from_the_first_value_of_a_piece() -> None:
    values = torch.zeros(2, 256)
    check_values(values, "w", "Q2_K", (1000, 256), 700 * 256)
    values[1, 3] = math.inf
    with pytest.raises(ModelError, match=r"w \(Q2_K \[1000, 256\]\) has a value that is inf, in row 701:"):
        check_values(values, "w", "Q2_K", (1000, 256), 700 * 256)
