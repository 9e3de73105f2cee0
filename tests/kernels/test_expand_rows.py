from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import lazyio.kernels
from lazyio.errors import TableError, Unsupported
from lazyio.kernels import contract
from lazyio.kernels.expand_rows import CONTROLS, SUPPORTED, Arguments, expand_rows, reference
from lazyio.ple.codec import decode
from lazyio.ple.dtypes import TYPES

STORED = sorted(SUPPORTED)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter


def row_values(stored: str) -> int:
    """So many that rows are no power of two of units, and their bytes often an odd multiple of 2."""
    return {1: 24, 32: 160, 160: 160, 256: 512}[TYPES[stored].block_values]


def packed_rows(rows: int, stored: str, seed: int = 0) -> np.ndarray:
    """Any bytes, and so any codes, scales and signs, infinite and subnormal ones among them."""
    row_bytes = TYPES[stored].row_bytes(row_values(stored))
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)


def arguments(stored: str, device: torch.device, rows: int = 13, n: int = 33, seed: int = 0) -> Arguments:
    inverse = torch.from_numpy(np.random.default_rng(seed + 1).integers(0, rows, n))
    return Arguments(torch.from_numpy(packed_rows(rows, stored, seed)).to(device), inverse.to(device), stored)


def with_bias(given: Arguments, heads: int = 3) -> Arguments:
    made = torch.Generator().manual_seed(2)
    bias = torch.randn(heads, row_values(given.stored), generator=made)
    head = torch.randint(heads, (len(given.inverse),), generator=made)
    device = given.packed.device
    return replace(given, scale=0.3, bias=bias.to(device), head=head.to(device))


def run(function, given: Arguments, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (len(given.inverse), row_values(given.stored))
    out = torch.full(shape, math.nan, dtype=dtype, device=given.packed.device)
    function(*(given.packed, given.inverse, given.stored, out), scale=given.scale, bias=given.bias, head=given.head)
    return out


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, signs of zeros too, but for the payload of NaNs."""
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    equal = (one.view(bits) == other.view(bits)) | (one.isnan() & other.isnan())
    return one.dtype == other.dtype and one.shape == other.shape and bool(equal.all())


def expected(given: Arguments) -> torch.Tensor:
    """By the codec, whose GGUF types are those of the gguf package."""
    packed, inverse = given.packed.cpu().numpy(), given.inverse.cpu().numpy()
    bias = None if given.bias is None else given.bias.cpu().numpy()[given.head.cpu().numpy()]
    with np.errstate(all="ignore"):
        return torch.from_numpy(decode(packed[inverse], given.stored, scale=given.scale, bias=bias))


@pytest.mark.parametrize("stored", STORED)
def test_the_reference_is_the_codec(stored: str):
    plain = arguments(stored, torch.device("cpu"))
    for given in (plain, replace(plain, scale=0.0078125), with_bias(plain)):
        wide = expected(given)
        assert not same(wide, torch.zeros_like(wide))
        assert same(run(reference, given), wide)
        for dtype in DTYPES:
            assert same(run(reference, given, dtype), wide.to(dtype))


@pytest.mark.parametrize("stored", STORED)
def test_the_kernel_is_the_reference(stored: str, device: torch.device):
    plain = arguments(stored, device)
    for given in (plain, with_bias(plain)):
        assert same(run(expand_rows, given), run(reference, given))
        assert same(run(expand_rows, given, torch.float16), run(reference, given, torch.float16))
        if device.type == "cuda":  # the interpreter cuts off what a bfloat16 has no room for, and does not round
            assert same(run(expand_rows, given, torch.bfloat16), run(reference, given, torch.bfloat16))


@pytest.mark.parametrize("stored", ["F8_E4M3", "F8_E5M2", "MXFP4"])
def test_every_first_byte(stored: str, device: torch.device):
    """Every code of a float, every exponent of a block."""
    packed = torch.full((256, TYPES[stored].block_bytes), 0x7B, dtype=torch.uint8, device=device)
    packed[:, 0] = torch.arange(256)
    inverse = torch.arange(256, device=device)
    out, wanted = torch.empty(2, 256, TYPES[stored].block_values, device=device)
    expand_rows(packed, inverse, stored, out)
    reference(packed, inverse, stored, wanted)
    assert same(out, wanted)
    assert same(wanted.cpu(), torch.from_numpy(decode(packed.cpu().numpy(), stored)))


@pytest.mark.gpu
@pytest.mark.parametrize("stored", STORED)
def test_the_kernel_is_the_reference_for_many_rows(stored: str):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    given = arguments(stored, torch.device("cuda"), rows=29_000, n=32_768)
    for dtype in DTYPES:
        assert same(run(expand_rows, given, dtype), run(reference, given, dtype))


@pytest.mark.parametrize("stored", ["F16", "Q8_0", "IQ4_NL", "Q6_K", "EXL3_K1"])
def test_faults_are_seen(stored: str, device: torch.device):
    given = with_bias(arguments(stored, device))
    right = run(reference, given)
    for name, fault in CONTROLS.items():
        assert not same(run(expand_rows, fault(given)), right), name


@pytest.mark.parametrize("stored", ["F32", "BF16", "F8_E5M2", "Q8_0"])
@pytest.mark.parametrize("values", [1, 7, 8, 96, 100])
def test_rows_of_any_length(stored: str, values: int, device: torch.device):
    block = TYPES[stored].block_values
    row_bytes = TYPES[stored].row_bytes(-(-values // block) * block)
    packed = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (9, row_bytes), np.uint8)).to(device)
    inverse = torch.arange(9, device=device).flip(0)
    out, wanted = torch.empty(2, 9, TYPES[stored].row_values(row_bytes), device=device)
    expand_rows(packed, inverse, stored, out)
    reference(packed, inverse, stored, wanted)
    assert same(out, wanted)


@pytest.mark.parametrize("function", [expand_rows, reference])
@pytest.mark.parametrize("stored", ["BF16", "IQ4_NL", "EXL3_K4"])
def test_rows_of_out_may_lie_apart(function, stored: str, device: torch.device):
    given = arguments(stored, device, n=50)
    values = row_values(stored)
    whole = torch.full((50, values + 9), 7.0, device=device)
    function(given.packed, given.inverse, stored, whole[:, 4 : 4 + values])
    assert same(whole[:, 4 : 4 + values].contiguous(), run(reference, given))
    assert (whole[:, :4] == 7).all()
    assert (whole[:, 4 + values :] == 7).all()


@pytest.mark.parametrize("function", [expand_rows, reference])
@pytest.mark.parametrize(("stored", "step"), [("Q4_0", 2), ("MXFP4", 1), ("F8_E4M3", 1), ("EXL3_K5", 2)])
def test_packed_rows_may_start_where_their_words_can(function, stored: str, step: int, device: torch.device):
    given = arguments(stored, device, rows=12)
    buffer = torch.zeros(given.packed.numel() + 64, dtype=torch.uint8, device=device)
    for first in (step, 3 * step, 17 * step):
        moved = buffer[first : first + given.packed.numel()].view_as(given.packed)
        moved.copy_(given.packed)
        assert same(run(function, replace(given, packed=moved)), run(reference, given))


@pytest.mark.parametrize("function", [expand_rows, reference])
def test_no_rows(function, device: torch.device):
    given = arguments("Q4_0", device)
    assert run(function, replace(given, inverse=given.inverse[:0])).shape == (0, 160)
    empty = replace(given, inverse=given.inverse[:0], packed=given.packed[:0])
    assert run(function, empty).shape == (0, 160)


@pytest.mark.parametrize("function", [expand_rows, reference])
def test_what_does_not_fit_is_refused(function):
    given = arguments("Q4_0", torch.device("cpu"), n=5)
    out = torch.empty(5, 160)
    packed, inverse, bias = given.packed, given.inverse, torch.zeros(2, 160)
    head = torch.zeros(5, dtype=torch.int64)

    def refused(text: str, *args: object, **rest: object) -> None:
        with pytest.raises(TableError, match=text):
            function(*args, **rest)

    refused("C-contiguous uint8", packed.int(), inverse, "Q4_0", out)
    refused("C-contiguous uint8", packed[:, ::2], inverse, "Q4_0", out)
    refused("multiple of 2 bytes", packed.flatten()[1:-89].view(-1, 90), inverse, "Q4_0", out)
    refused("int64", packed, inverse.int(), "Q4_0", out)
    refused(r"\[5, 160\].*float64", packed, inverse, "Q4_0", out.double())
    refused(r"\[5, 160\].*float32 \[4, 160\]", packed, inverse, "Q4_0", out[:4])
    refused(r"contiguous", packed, inverse, "Q4_0", torch.empty(160, 5).T)
    refused("91 bytes", torch.zeros(4, 91, dtype=torch.uint8), inverse, "Q4_0", out)
    refused("none to take them from", packed[:0], inverse, "Q4_0", out)
    refused("only one of the two", packed, inverse, "Q4_0", out, bias=bias)
    refused("only one of the two", packed, inverse, "Q4_0", out, head=head)
    refused(r"float32 \[heads, 160\]", packed, inverse, "Q4_0", out, bias=bias.half(), head=head)
    refused(r"int64 \[5\]", packed, inverse, "Q4_0", out, bias=bias, head=head[:4])
    refused("another device", packed, inverse.to("meta"), "Q4_0", out)
    with pytest.raises(Unsupported, match=r"type IQ1_S have no kernel; LazyTable\.decode"):
        function(packed, inverse, "IQ1_S", out)


def test_an_inverse_beyond_the_rows_is_refused_on_the_cpu():
    given = arguments("Q4_0", torch.device("cpu"), rows=4)
    with pytest.raises(IndexError):
        run(reference, replace(given, inverse=given.inverse + 4))


def test_without_triton(monkeypatch: pytest.MonkeyPatch):
    """Modules that can't be imported stand for None; the module is loaded anew, as if for the first time."""
    contract.bodies.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lazyio.kernels.row_bodies", raising=False)
    monkeypatch.delattr(lazyio.kernels, "row_bodies", raising=False)
    loading = importlib.util.find_spec("lazyio.kernels.expand_rows")
    fresh = importlib.util.module_from_spec(loading)
    monkeypatch.setitem(sys.modules, loading.name, fresh)
    loading.loader.exec_module(fresh)
    given = arguments("Q4_0", torch.device("cpu"))
    assert same(run(fresh.reference, given), run(reference, given))
    with pytest.raises(Unsupported, match="the row kernel needs Triton, which can't be imported"):
        run(fresh.expand_rows, given)


COMPILE = """
import json, sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from lazyio.kernels import expand_rows, row_bodies
from lazyio.ple.dtypes import TYPES

for stored in sys.argv[1:]:
    values = 768
    body, decode, width, _ = expand_rows._body(row_bodies, stored, 160 if stored.startswith("EXL3") else values)
    constants = dict(DECODE=decode, ROW_UNITS=90, ROW_VALUES=values, WIDTH=width, UNITS=64, SCALED=True, BIASED=True)
    types = dict(packed="*fp32" if stored == "F32" else "*u8", words="*u16", inverse="*i64", out="*bf16", scale="fp32")
    types |= dict(out_stride="i32", n="i32", bias="*fp32", head="*i64")
    source = ASTSource(
        body,
        {name: types.get(name, "constexpr") for name in body.arg_names},
        {(body.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=expand_rows._COMPILED)
    print(json.dumps([stored, compiled.asm["ptx"]]))
"""


def test_bodies_compile_and_fuse_nothing():
    """For a GPU that need not be there. A fused multiply-add would round once where the reference rounds twice."""
    pytest.importorskip("triton")
    stored = ["Q4_K", "EXL3_K3"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *stored], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assembly = dict(map(json.loads, done.stdout.splitlines()))
    assert list(assembly) == stored
    for text in assembly.values():
        assert "st.global" in text
        assert "fma.rn" not in text
