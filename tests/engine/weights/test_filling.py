from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from lazyio.engine.synthetic.rows import Rows
from lazyio.engine.weights.filling import fill, fill_packed, passing_bytes
from lazyio.engine.weights.fp8 import block_scale
from lazyio.engine.weights.reading import LANDING_BYTES, FileOnce, Landing, identity_of
from lazyio.engine.weights.source import Part
from lazyio.engine.weights.tiles import Tiles
from lazyio.engine.weights.trunk import _form
from lazyio.kernels.packed import PACKED_TYPES, empty, reference_dequantise
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.dtypes import TYPES
from lazyio.ple.safetensors import open_safetensors

CPU = torch.device("cpu")


def filled(parameter: torch.Tensor, *parts: Part, landing_bytes: int = 4096) -> torch.Tensor:
    with Landing(CPU, landing_bytes) as landing:
        for part in parts:
            with FileOnce(part.stored.path, identity_of(part.stored.path)) as file:
                fill(parameter, part, file, landing)
    return parameter


def stored(write: Callable[..., Path], tensor: torch.Tensor, name: str = "weight") -> StoredTensor:
    return open_safetensors(str(write({name: tensor}))).tensor(name)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shape", [(), (5,), (5000,), (70, 33), (3, 2000), (3, 40, 50), (2, 3, 1500), (2, 2, 20, 30)])
def test_pieces_of_any_shape_make_the_whole(write: Callable[..., Path], shape: tuple[int, ...]) -> None:
    values = random(*shape)
    target = torch.full(shape or (1,), float("nan"))
    assert torch.equal(filled(target, Part(stored(write, values))), values.view(target.shape))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_rounded_once_to_the_parameters_dtype(
    write: Callable[..., Path], kept: torch.dtype, wanted: torch.dtype
):
    values = random(70, 33).to(kept)
    found = filled(torch.empty(70, 33, dtype=wanted), Part(stored(write, values)))
    assert torch.equal(found, values.to(wanted))


def test_dimensions_of_one_do_not_matter(write: Callable[..., Path]) -> None:
    values = random(70, 4)
    assert torch.equal(filled(torch.empty(70, 1, 4), Part(stored(write, values)))[:, 0], values)
    assert torch.equal(filled(torch.empty(1, 70, 4), Part(stored(write, values)))[0], values)


def test_a_part_fills_its_place_alone(write: Callable[..., Path]) -> None:
    values, target = random(3, 40, 20), torch.zeros(3, 100, 20)
    filled(target, Part(stored(write, values), (slice(0, 3), slice(50, 90))))
    assert torch.equal(target[:, 50:90], values)
    assert not target[:, :50].any()
    assert not target[:, 90:].any()

    filled(target, Part(stored(write, values[1]), (slice(2, 3), slice(0, 40))))
    assert torch.equal(target[2, :40], values[1])
    assert not target[:2, :50].any()


def test_a_change_sees_all_values_in_float32(write: Callable[..., Path]) -> None:
    values = random(100, 40).bfloat16()
    seen: list[torch.Tensor] = []

    def turned(whole: torch.Tensor) -> torch.Tensor:
        seen.append(whole.clone())
        return whole.flip(0) - 1

    part = Part(stored(write, values), (slice(20, 120),), turned)
    found = filled(torch.zeros(120, 40, dtype=torch.float16), part)
    assert [whole.dtype for whole in seen] == [torch.float32]
    assert torch.equal(seen[0], values.float())
    assert torch.equal(found[20:], (values.float().flip(0) - 1).half())
    assert not found[:20].any()
    assert passing_bytes([part]) - passing_bytes([Part(part.stored)]) == 2 * 4 * 100 * 40
    assert passing_bytes([]) == 4 * LANDING_BYTES


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(60, 96), (4096,), (3, 50, 64)])
def test_types_of_gguf(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    kind = GGMLQuantizationType[name]
    packed = quantize(random(*shape).numpy(), kind)
    (tmp_path / "file").write_bytes(b"x" * 32 + packed.tobytes())
    tensor = StoredTensor("t", name, shape, str(tmp_path / "file"), 32, packed.nbytes)
    expected = torch.from_numpy(np.asarray(dequantize(packed, kind), np.float32).reshape(shape))
    assert torch.equal(filled(torch.full(shape, float("nan")), Part(tensor)), expected)
    assert torch.equal(filled(torch.empty(shape, dtype=torch.bfloat16), Part(tensor)), expected.bfloat16())


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_types_of_gguf_in_blocks_of_256(tmp_path: Path, name: str) -> None:
    kind, shape = GGMLQuantizationType[name], (30, 512)
    block_bytes = {"Q4_K": 144, "Q6_K": 210, "IQ4_XS": 136}[name]
    packed = np.random.default_rng(0).integers(0, 64, (30, 2 * block_bytes), dtype=np.uint8)
    (tmp_path / "file").write_bytes(packed.tobytes())
    tensor = StoredTensor("t", name, shape, str(tmp_path / "file"), 0, packed.nbytes)
    expected = torch.from_numpy(dequantize(packed, kind))
    assert expected.isfinite().all()
    assert torch.equal(filled(torch.empty(shape), Part(tensor)), expected)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(300, 50), (2, 100, 50), (2, 10, 3000)])
def test_fp8_in_ragged_blocks(write: Callable[..., Path], kind: torch.dtype, shape: tuple[int, ...]) -> None:
    values = random(*shape).to(kind)
    *experts, rows, columns = shape
    scales = random(*experts, math.ceil(rows / 16), math.ceil(columns / 32)).abs()
    checkpoint = open_safetensors(str(write({"weight": values, "scale": scales})))
    weight = checkpoint.tensor("weight")
    part = Part(weight, scale=block_scale(weight, checkpoint.tensor("scale"), (16, 32)))
    spread = scales.repeat_interleave(16, -2).repeat_interleave(32, -1)[..., :rows, :columns]
    expected = values.float() * spread
    assert torch.equal(filled(torch.full(shape, float("nan")), part), expected)
    assert torch.equal(filled(torch.empty(shape, dtype=torch.bfloat16), part), expected.bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_as_on_the_host(write: Callable[..., Path], dtype: torch.dtype) -> None:
    values = random(3, 400, 50)
    part = Part(stored(write, values), (slice(0, 3), slice(100, 500)))
    target = torch.zeros(3, 500, 50, dtype=dtype, device="cuda")
    with Landing(target.device, 1 << 14) as landing, FileOnce(part.stored.path, identity_of(part.stored.path)) as file:
        fill(target, part, file, landing)
    assert torch.equal(target[:, 100:].cpu(), values.to(dtype))
    assert not target[:, :100].any()


# --- packed ----------------------------------------------------------------------------------------------------------


def fill_whole(
    stored: str, path: Path, shape: tuple[int, ...], *, tiles: Tiles | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is held of a random tensor that is alone in its file, filled in small pieces, and what it should be."""
    packed = np.empty((math.prod(shape[:-1]), TYPES[stored].row_bytes(shape[-1])), np.uint8)
    Rows(stored, shape[-1], seed=3).fill(0, packed)
    path.write_bytes(packed.tobytes())
    tensor = StoredTensor("weight", stored, shape, str(path), 0, packed.nbytes)
    weight = empty(stored, shape, CPU)
    part = Part(tensor, change=None if tiles is None else tiles.undo, tiles=tiles)
    with Landing(CPU, 4096) as landing, FileOnce(str(path), identity_of(str(path))) as file:
        fill_packed(weight, part, file, landing)
    expected = torch.from_numpy(dequantize(packed, GGMLQuantizationType[stored])).view(shape)
    return reference_dequantise(weight), expected if tiles is None else tiles.undo(expected)


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES - {"F8_E4M3"}))
@pytest.mark.parametrize("shape", [(70, 256), (3, 40, 768), (2, 3, 256)])
def test_packed_pieces_make_the_whole(tmp_path: Path, stored: str, shape: tuple[int, ...]) -> None:
    found, expected = fill_whole(stored, tmp_path / "file", shape)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES - {"F8_E4M3"}))
@pytest.mark.parametrize("dim", [0, 1])
def test_heads_are_moved_without_being_unpacked(tmp_path: Path, stored: str, dim: int) -> None:
    wide = TYPES[stored].block_values if dim else 5
    tiles = Tiles(key_heads=2, shared=3, wide=wide, before=2 * wide, dim=dim)
    shape = (40, 8 * wide) if dim else (8 * wide, 256)
    found, expected = fill_whole(stored, tmp_path / "file", shape, tiles=tiles)
    assert torch.equal(found, expected)


def test_heads_that_are_no_whole_blocks_can_not_be_moved() -> None:
    tiles = Tiles(key_heads=2, shared=3, wide=128, before=0, dim=1)
    for stored, movable in (("Q4_0", True), ("Q5_K", False)):
        part = Part(StoredTensor("weight", stored, (40, 768), "file", 0, 0), change=tiles.undo, tiles=tiles)
        assert _form((40, 768), [part], torch.float32, may=True).packed == (stored if movable else None)
