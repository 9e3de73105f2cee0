from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazyio.engine.weights.fp8 import block_scale, read_scale, scaled
from lazyio.errors import ModelError
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.safetensors import open_safetensors

CPU = torch.device("cpu")
BLOCK = (4, 3)


def stored(*shape: int, dtype: str = "F8_E4M3", name: str = "weight") -> StoredTensor:
    return StoredTensor(name, dtype, shape, "file", 0, None)


@pytest.mark.parametrize(
    ("weight", "scale", "block"),
    [
        ((10, 7), (3, 3), BLOCK),
        ((10, 7), (10, 1), (1, 7)),
        ((10, 7), (10,), (1, 7)),
        ((10, 7), (), (10, 7)),
        ((10, 7), (1, 1), (10, 7)),
        ((2, 10, 7), (2, 3, 3), BLOCK),
        ((2, 10, 7), (2, 10, 1), (1, 7)),
        ((2, 10, 7), (2,), (10, 7)),
        ((2, 10, 7), (2, 1, 1), (10, 7)),
    ],
)
def test_the_shape_tells_what_a_scale_is_for(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]):
    assert block_scale(stored(*weight), stored(*scale, dtype="F32"), BLOCK).block == block


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (stored(10, 7), stored(2, 3, dtype="F32")),
        (stored(10, 7), stored(7, dtype="F32")),
        (stored(10, 7), stored(3, 3, dtype="F8_E8M0")),
        (stored(10), stored(1, dtype="F32")),
    ],
)
def test_other_scales_are_refused(weight: StoredTensor, scale: StoredTensor) -> None:
    with pytest.raises(ModelError, match=r"which can't scale weight \[10.*for each block of \[4, 3\]"):
        block_scale(weight, scale, BLOCK)


@pytest.mark.parametrize("dtype", ["BF16", "I8"])
def test_other_weights_are_not_scaled(dtype: str) -> None:
    with pytest.raises(ModelError, match=f"weight is {dtype} and has scale; only fp8 is scaled here"):
        block_scale(stored(10, 7, dtype=dtype), stored(3, 3, dtype="F32", name="scale"), BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 3), (10, 1), (1,)])
@pytest.mark.parametrize("experts", [(), (2,)])
def test_boxes_are_scaled_like_the_whole(
    write: Callable[..., Path], shape: tuple[int, ...], experts: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(*experts, 10, 7, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(*experts, *shape, generator=generator).to(dtype)
    checkpoint = open_safetensors(str(write({"weight": values, "scale": scales})))
    weight = checkpoint.tensor("weight")
    scale = block_scale(weight, checkpoint.tensor("scale"), BLOCK)
    read = read_scale(weight, scale, CPU)

    expected = values.float()
    for index in torch.cartesian_prod(*(torch.arange(size) for size in values.shape)).tolist():
        *expert, row, column = index
        at = {(3, 3): (row // 4, column // 3), (10, 1): (row, 0), (1,): (0,)}[shape]
        expected[tuple(index)] *= scales[(*expert, *at)].float()

    for rows, columns in ((slice(0, 10), slice(0, 7)), (slice(3, 9), slice(0, 7)), (slice(5, 6), slice(2, 7))):
        for lead in [(slice(0, 2),), (slice(1, 2),)] if experts else [()]:
            box = (*lead, rows, columns)
            found = scaled(values[box], read, scale.block, box)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected[box])
