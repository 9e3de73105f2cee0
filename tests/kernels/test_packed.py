from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from lazyio.errors import ModelError, Unsupported
from lazyio.kernels import packed
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, empty, pack, pack_into, reference_dequantise
from lazyio.ple.dtypes import TYPES

GGUF = sorted(PACKED_TYPES - {"F8_E4M3"})
# Where the float16 of a block are, in elements of two bytes.
SCALES = {
    **{"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 1], "Q5_0": [0], "Q5_1": [0, 1], "IQ4_NL": [0]},
    **{"Q4_K": [0, 1], "Q5_K": [0, 1], "Q6_K": [104]},
}


def rows(stored: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bytes but for scales, which are finite: uint8 [..., row_bytes]."""
    generator = np.random.default_rng(seed)
    *leading, inputs = shape
    blocks = math.prod(leading) * inputs // TYPES[stored].block_values
    raw = generator.integers(0, 256, (blocks, TYPES[stored].block_bytes), np.uint8)
    for place in SCALES[stored]:
        raw.view(np.float16)[:, place] = generator.normal(0, 0.01, blocks)
    return torch.from_numpy(raw.reshape(*leading, -1))


def by_gguf(raw: torch.Tensor, stored: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[stored]))


def fp8_codes(shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=made).to(torch.float8_e4m3fn).view(torch.uint8)


def fp8(shape: tuple[int, ...], block: tuple[int, int]) -> PackedWeight:
    weight = empty("F8_E4M3", shape, torch.device("cpu"), block)
    pack_into(weight, fp8_codes(shape))
    weight.planes[1].copy_(torch.rand(weight.planes[1].shape, generator=torch.Generator().manual_seed(1)))
    return weight


@pytest.mark.parametrize("stored", GGUF)
@pytest.mark.parametrize("shape", [(5, 512), (3, 2, 256), (3, 96)], ids=str)
def test_values_are_those_of_gguf(stored: str, shape: tuple[int, ...]):
    if shape[-1] % TYPES[stored].block_values:
        pytest.skip("no whole number of blocks")
    raw = rows(stored, shape)
    assert torch.equal(reference_dequantise(pack(raw, stored, shape)), by_gguf(raw, stored))


def test_fp8_is_scaled_by_blocks():
    weight = fp8((2, 5, 7), (2, 3))
    codes = fp8_codes((2, 5, 7)).view(torch.float8_e4m3fn).float()
    scales = weight.planes[1]
    values = reference_dequantise(weight)
    assert scales.shape == (2, 3, 3)
    assert values[1, 4, 6] == codes[1, 4, 6] * scales[1, 2, 2]
    assert values[0, 1, 3] == codes[0, 1, 3] * scales[0, 0, 1]
    rows, columns = torch.arange(5) // 2, torch.arange(7) // 3
    assert torch.equal(values, codes * scales[:, rows][:, :, columns])


@pytest.mark.parametrize("stored", GGUF)
def test_rows_come_in_pieces_and_experts_apart(stored: str):
    shape = (3, 7, 512)
    raw = rows(stored, shape)
    weight = empty(stored, shape, torch.device("cpu"))
    for expert in range(3):
        pack_into(weight[expert], raw[expert, 4:], 4)
        pack_into(weight[expert], raw[expert, :4])
    whole = pack(raw, stored, shape)
    assert all(map(torch.equal, weight.planes, whole.planes))
    assert torch.equal(reference_dequantise(weight[1]), by_gguf(raw, stored)[1])


@pytest.mark.parametrize("stored", GGUF)
def test_planes_are_hardly_larger_than_the_file(stored: str):
    shape = (4, 1024)
    weight = pack(rows(stored, shape), stored, shape)
    assert weight.nbytes <= 1.03 * 4 * TYPES[stored].row_bytes(1024)
    assert [(plane.shape, plane.dtype) for plane in weight.planes] == packed.plane_shapes(stored, shape)


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_random_weights_have_the_spread_asked_for(stored: str):
    made = torch.Generator().manual_seed(0)
    weight = packed.random(stored, (2, 64, 1024), torch.device("cpu"), made, 0.02)
    values = reference_dequantise(weight)
    assert values.isfinite().all()
    assert values.std().item() == pytest.approx(0.02, rel=0.15)
    assert abs(values.mean().item()) < 0.003
    assert values[0, 0].unique().numel() > 12


def test_what_can_not_be_packed_is_refused():
    with pytest.raises(Unsupported, match="Q2_K can't be kept packed"):
        empty("Q2_K", (4, 256), torch.device("cpu"))
    with pytest.raises(ModelError, match="rows of 300 values are no whole number of blocks of 256"):
        empty("Q4_K", (4, 300), torch.device("cpu"))
    with pytest.raises(ModelError, match="needs the rows and columns of its scales"):
        empty("F8_E4M3", (4, 300), torch.device("cpu"))


def test_weights_move_whole():
    weight = pack(rows("Q5_K", (4, 256)), "Q5_K", (4, 256))
    moved = weight.to(torch.device("meta"))
    assert (moved.device.type, moved.shape, moved.nbytes) == ("meta", (4, 256), weight.nbytes)
