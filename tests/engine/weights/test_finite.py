"""Damaged blocks are found, and told by tensor and row, whether weights stay packed or become values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyio.engine.synthetic.rows import Rows
from lazyio.engine.weights.filling import fill, fill_packed
from lazyio.engine.weights.finite import check_packed, check_values
from lazyio.engine.weights.fp8 import block_scale
from lazyio.engine.weights.reading import FileOnce, Landing, identity_of
from lazyio.engine.weights.source import Part
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


def test_rows_are_counted_from_the_first_value_of_a_piece() -> None:
    values = torch.zeros(2, 256)
    check_values(values, "w", "Q2_K", (1000, 256), 700 * 256)
    values[1, 3] = math.inf
    with pytest.raises(ModelError, match=r"w \(Q2_K \[1000, 256\]\) has a value that is inf, in row 701:"):
        check_values(values, "w", "Q2_K", (1000, 256), 700 * 256)
