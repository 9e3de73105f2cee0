from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lazyio.errors import Unsupported
from lazyio.kernels import packed, packed_matmul
from lazyio.kernels.contract import error_of
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, reference_dequantise
from lazyio.kernels.packed_matmul import CONTROLS, MOST_NARROW, Arguments, dequantise, matmul, reference
from lazyio.ple.dtypes import TYPES


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program whatever its size: without a GPU, those of one row are large."""
    if not torch.cuda.is_available():
        large = [(least, replace(config, outputs=64)) for least, config in packed_matmul.SINGLE]
        monkeypatch.setattr(packed_matmul, "SINGLE", large)


def random(stored: str, shape: tuple[int, ...], device: torch.device, seed: int = 1) -> PackedWeight:
    return packed.random(stored, shape, device, made(device, seed), 0.02, (8, 64))


def made(device: torch.device, seed: int = 1) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


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
    weight = packed.random("F8_E4M3", shape, device, made(device), 0.02, block)
    assert torch.equal(dequantise(weight, torch.float32), reference_dequantise(weight))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is infinite
@pytest.mark.parametrize("stored", ["F8_E4M3", "IQ4_NL", "Q5_K", "Q6_K", "Q8_0"])
def test_a_row_is_the_same_alone_and_among_others(stored: str, device: torch.device):
    weight = random(stored, (40, 1280), device)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(16, 1280, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    together = matmul(x, weight)
    for count in (5, 2):
        assert torch.equal(matmul(x[:count], weight), together[:count])
    noise = torch.cat([x[:1], torch.full_like(x[1:9], torch.inf)])
    assert torch.equal(matmul(noise, weight)[:1], together[:1])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_faults_of_codes_and_scales_are_seen(stored: str, rows: int, device: torch.device):
    given = Arguments.random(device, 1, stored, (17, 256), rows)
    right = reference(given.x, given.weight)
    for name in ("halves of bytes swapped", "scales of the row before", "last inputs left out"):
        found = CONTROLS[name](given)
        assert error_of([matmul(found.x, found.weight)], [right], 5e-6) > 1e-3, name


def test_few_rows_take_the_kernel_of_few_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    launched = []
    for name in ("launch_single", "launch_narrow"):
        monkeypatch.setattr(packed_matmul, name, lambda x, *_, name=name: launched.append((name, len(x))))
    weight = random("Q4_0", (8, 64), device)
    for rows in (0, 1, 2, MOST_NARROW, MOST_NARROW + 1):
        x = torch.zeros(rows, 64, device=device)
        assert matmul(x, weight).shape == (rows, 8)
    matmul(torch.zeros(1, 64, device=device), packed.random("F8_E4M3", (8, 64), device, made(device), 0.02, (4, 24)))
    assert launched == [("launch_single", 1), ("launch_narrow", 2), ("launch_narrow", MOST_NARROW)]


def test_old_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    plane = SimpleNamespace(device=torch.device("cuda"), is_contiguous=lambda: True)
    weight = PackedWeight("Q4_0", (8, 64), (plane, plane))
    with pytest.raises(Unsupported, match=r"capability 8\.0; this one has 7\.5"):
        dequantise(weight, torch.float32)


@pytest.mark.parametrize("stored", sorted(PACKED_TYPES))
def test_each_code_is_multiplied_as_what_it_stands_for(stored: str, device: torch.device):
    """Rows with a single 1 take single values out of a weight: small ones, which others would hide, are seen too."""
    weight = packed.random(stored, (16, 256), device, made(device), 20.0, (16, 256))
    values = reference_dequantise(weight)
    if stored == "F8_E4M3":
        assert values.unique().numel() > 250
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype == torch.bfloat16 and device.type == "cpu":  # the interpreter cuts off what it has no room for
            continue
        for start, rows in ((0, 16), (192, 16), (68, 1), (252, 1)):
            x = torch.eye(256, device=device, dtype=dtype)[start : start + rows].contiguous()
            found = matmul(x, weight).float().t()
            torch.testing.assert_close(found, values[:, start : start + rows], rtol=0.01, atol=0)
