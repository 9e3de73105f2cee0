from __future__ import annotations

import pytest
import torch

from lazyio.kernels import packed
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, reference_dequantise
from lazyio.kernels.packed_matmul import dequantise
from lazyio.ple.dtypes import TYPES


def random(stored: str, shape: tuple[int, ...], device: torch.device, seed: int = 1) -> PackedWeight:
    return packed.random(stored, shape, device, torch.Generator(device).manual_seed(seed), 0.02, (8, 64))


@pytest.mark.parametrize("inputs", [256, 768, 96])
@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_tiles_are_the_reference_bit_for_bit(stored: str, inputs: int, device: torch.device):
    if inputs % TYPES[stored].block_values:
        pytest.skip("no whole number of blocks")
    weight = random(stored, (3, 19, inputs), device)
    assert torch.equal(dequantise(weight, torch.float32), reference_dequantise(weight))
    assert torch.equal(dequantise(weight[1], torch.float32), reference_dequantise(weight[1]))


@pytest.mark.parametrize(("shape", "block"), [((3, 19, 100), (7, 5)), ((19, 640), (128, 1000)), ((2, 9, 64), (1, 48))])
def test_blocks_of_fp8_have_any_size(shape: tuple[int, ...], block: tuple[int, int], device: torch.device):
    made = torch.Generator(device).manual_seed(1)
    weight = packed.random("F8_E4M3", shape, device, made, 0.02, block)
    assert torch.equal(dequantise(weight, torch.float32), reference_dequantise(weight))
