"""Products with quantised weights, which stay packed in memory. The bodies are in packed_matmul_bodies.py.

Few rows are multiplied with the codes as they are, in one pass over the weight's bytes: a single one without tensor
cores, up to 16 together. For more the weight is dequantised first, and the product left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazyio.errors import Unsupported
from lazyio.kernels import packed
from lazyio.kernels.contract import Case, Kernel, bodies, shared_bytes
from lazyio.kernels.packed import PACKED_TYPES, PackedWeight, reference_dequantise
from lazyio.ple.dtypes import TYPES

#: Rows that the weight's codes are multiplied with as they are; no tensor cores are used for a single one.
MOST_NARROW = 16

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OLDEST = (8, 0)


def matmul(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T: [rows, outputs] in x's dtype, on the current stream; never waits.

    x [rows, inputs], contiguous: float32, bfloat16 or float16; sums are in float32. The result of a row doesn't depend
    on what the others are; nor on how many there are, from 2 to MOST_NARROW: a single one is added in another order.
    With more, the weight is dequantised into memory for as long as the product takes.
    Raises Unsupported where Triton is missing, and on a GPU older than compute capability 8.0.
    """
    _check(x, weight)
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    else:
        assert out.shape == (x.shape[0], weight.shape[0]), "out is [rows, outputs]"
        assert out.dtype == x.dtype, "out has another dtype than x"
        assert out.is_contiguous(), "out is not contiguous"
    if not out.numel():
        return out
    if len(x) > MOST_NARROW or not weight.shares_scales:
        return torch.matmul(x, dequantise(weight, x.dtype).t(), out=out)
    if len(x) == 1 and weight.shape[1] % 32 == 0:
        launch_single(x, weight, out, next(config for least, config in SINGLE if weight.shape[0] >= least))
        return out
    launch_narrow(x, weight, out, next(config for least, config in NARROW if weight.shape[0] >= least))
    return out


def reference(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """What `matmul` does, in plain torch and on any device, with values rounded to x's dtype and sums in float32."""
    values = reference_dequantise(weight).to(x.dtype)
    return (x.float() @ values.float().t()).to(x.dtype)


def dequantise(weight: PackedWeight, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """All values of a weight, rounded to `dtype`: [..., outputs, inputs], contiguous, on the current stream."""
    _check_device(weight)
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    assert out.shape == weight.shape, "out has another shape than the weight"
    assert out.dtype == dtype, "out has another dtype than is asked for"
    assert out.is_contiguous(), "out is not contiguous"
    *experts, outputs, inputs = weight.shape
    config = EXPAND
    grid = ((experts[0] if experts else 1) * -(-outputs // config.outputs), -(-inputs // config.inputs))
    _bodies().expand[grid](
        *(*weight.pointers(), out),
        **_constants(weight),
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        num_warps=config.warps,
    )
    return out


@dataclass(frozen=True, slots=True)
class Config:
    """How a body is launched."""

    outputs: int  # of a program, at once
    inputs: int
    warps: int
    stages: int = 1
    unroll: int = 1  # steps at once, of a single row


#: Chosen on an H200.
EXPAND = Config(8, 512, 4)

#: By the least number of outputs, the first that fits. Inputs and warps decide in which order a row's products are
#: added, so they don't depend on how many rows there are.
NARROW: Sequence[tuple[int, Config]] = [(8192, Config(32, 512, 4, 3)), (0, Config(16, 1024, 8, 3))]


#: As `NARROW`, of a single row, by what programs take of an H200. Inputs are 32 times pieces.
SINGLE: Sequence[tuple[int, Config]] = [
    (100_000, Config(32, 512, 4, unroll=5)),
    (8192, Config(16, 512, 4, unroll=5)),
    (0, Config(8, 512, 4, unroll=12)),
]


def launch_single(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, config: Config) -> None:
    """The kernel of a single row, as `config` says."""
    assert len(x) == 1, "x is not a single row"
    x = packed.aligned(x)
    pieces, steps = packed.step_pieces(weight, config.inputs)
    _bodies().single[(-(-weight.shape[0] // config.outputs),)](
        *(x, *weight.pointers(), out),
        **_constants(weight),
        BLOCK_N=config.outputs,
        PIECES=pieces,
        UNROLL=_divisor(steps, config.unroll),
        num_warps=config.warps,
        num_stages=1,
    )


@functools.cache
def _divisor(steps: int, most: int) -> int:
    """The largest number up to `most` that divides them."""
    return max(some for some in range(1, most + 1) if steps % some == 0)


def launch_narrow(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, config: Config) -> None:
    """The kernel of few rows, as `config` says."""
    tokens = x.shape[0]
    rows = 8 if tokens <= 8 else 16
    _bodies().narrow[(-(-weight.shape[0] // config.outputs) * -(-tokens // rows),)](
        *(x, *weight.pointers(), out, tokens),
        **_constants(weight),
        BLOCK_M=rows,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        num_warps=config.warps,
        num_stages=_stages(config, x, weight, rows),
    )


def _stages(config: Config, x: torch.Tensor, weight: PackedWeight, rows: int) -> int:
    """As many as a program of this GPU has memory for: one buffer less than stages."""
    if x.device.type != "cuda":
        return config.stages
    has = shared_bytes(x.device)
    of_rows = rows * x.element_size()
    of_codes = config.outputs * weight.planes[0].nbytes // (weight.shape[0] * weight.shape[1])
    return max(1, min(config.stages, 1 + has // (config.inputs * (of_rows + of_codes + config.outputs * 3 // 8))))


def _constants(weight: PackedWeight) -> Mapping[str, Any]:
    return _constants_of(weight.stored, weight.shape, weight.block)


@functools.cache
def _constants_of(stored: str, shape: tuple[int, ...], block: tuple[int, int] | None) -> Mapping[str, Any]:
    rows, columns = block or (1, 1)
    outputs, inputs = shape[-2:]
    return {"STORED": stored, "N": outputs, "K": inputs, "ROWS": rows, "COLUMNS": columns}


def _bodies() -> Any:
    return bodies("packed_matmul_bodies", "the kernels of packed weights")


def _check(x: torch.Tensor, weight: PackedWeight) -> None:
    _check_device(weight)
    assert len(weight.shape) == 2, "the weight is [outputs, inputs]; take one expert of several"
    assert x.ndim == 2, "x is [rows, inputs]"
    assert x.shape[1] == weight.shape[1], f"x has {x.shape[1]} inputs, the weight {weight.shape[1]}"
    assert x.dtype in _DTYPES, f"x is {x.dtype}, not one of {_DTYPES}"
    assert x.is_contiguous(), "x is not contiguous"
    assert x.device == weight.device, "x and the weight are on different devices"


def _check_device(weight: PackedWeight) -> None:
    assert weight.contiguous, "a plane is not contiguous"
    device = weight.device
    if device.type == "cuda":
        _check_capability(device)


@functools.cache
def _check_capability(device: torch.device) -> None:
    if (has := torch.cuda.get_device_capability(device)) < _OLDEST:
        raise Unsupported(
            f"kernels of packed weights need a GPU of compute capability {_OLDEST[0]}.{_OLDEST[1]}; this one has "
            f"{has[0]}.{has[1]}: dequantise the weights when they are loaded"
        )


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `matmul`."""

    x: torch.Tensor
    weight: PackedWeight

    @classmethod
    def random(
        cls,
        device: torch.device,
        seed: int,
        stored: str,
        shape: tuple[int, ...],
        rows: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> Arguments:
        """Of a weight of this shape, or of the last of its experts."""
        made = torch.Generator(device).manual_seed(seed)
        weight = packed.random(stored, shape, device, made, 0.02, (8, 32))
        x = torch.randn(rows, shape[-1], generator=made, device=device).to(dtype)
        return cls(x, weight if len(shape) == 2 else weight[shape[0] - 1])


def _of_plane(number: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], Arguments]:
    """A change of codes, high bits, scales or units, by their place among the pointers."""

    def fault(given: Arguments) -> Arguments:
        plane = given.weight.pointers()[number]
        planes = tuple(change(one) if one is plane else one for one in given.weight.planes)
        return replace(given, weight=replace(given.weight, planes=planes))

    return fault


def _swapped(codes: torch.Tensor) -> torch.Tensor:
    some = codes.view(torch.uint8)
    return (some << 4 | some >> 4).view(codes.dtype)


def _without_last(given: Arguments) -> Arguments:
    x = given.x.clone()
    x[:, -32:] = 0
    return replace(given, x=x)


def _without_least(given: Arguments) -> Arguments:
    """Least values are in the upper halves of the last plane, with their scales or their units."""
    *others, pairs = given.weight.planes
    return replace(given, weight=replace(given.weight, planes=(*others, pairs & 0xFFFF)))


#: Faults by name, for types that have all planes, and least values.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "halves of bytes swapped": _of_plane(0, _swapped),
    "codes of another place": _of_plane(0, lambda codes: codes.roll(1, -1)),
    "high bits lost": _of_plane(1, torch.zeros_like),
    "high bits of another place": _of_plane(1, lambda high: high.roll(1, -1)),
    "scales of the group before": _of_plane(2, lambda scales: scales.roll(1, -1)),
    "scales of the row before": _of_plane(2, lambda scales: scales.roll(1, 0)),
    "least values lost": _without_least,
    "last inputs left out": _without_last,
    "rows mixed up": lambda given: replace(given, x=given.x.roll(1, 0)),
}

_WITHIN = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def _cases() -> list[Case[Arguments]]:
    def case(name: str, stored: str, shape: tuple[int, ...], large: bool = False, **rest: Any) -> Case[Arguments]:
        make = functools.partial(Arguments.random, stored=stored, shape=shape, **rest)
        within = _WITHIN[rest.get("dtype", torch.float32)]
        return Case(f"{stored}, {name}", make, within, name == "few rows" and stored in ("Q5_1", "Q5_K"), large)

    found = []
    for stored in sorted(PACKED_TYPES):
        block = TYPES[stored].block_values
        found += [
            case("few rows", stored, (19, 768 if block == 256 else 96)),
            case("an expert", stored, (2, 16, 256), rows=1, dtype=torch.float16),
            case("many rows", stored, (24, 256), rows=MOST_NARROW + 1),
            case("12 rows, float16", stored, (24, 256), rows=12, dtype=torch.float16),
            case("16 rows, bfloat16", stored, (2560, 6144), large=True, rows=16, dtype=torch.bfloat16),
            case("a row, bfloat16", stored, (12290, 2560), large=True, rows=1, dtype=torch.bfloat16),
            case("5 rows, float16", stored, (640, 1280), large=True, rows=5, dtype=torch.float16),
            case("300 rows, bfloat16", stored, (640, 2560), large=True, rows=300, dtype=torch.bfloat16),
        ]
    return found


KERNEL = Kernel(
    name="packed_matmul",
    run=lambda given: [matmul(given.x, given.weight)],
    reference=lambda given: [reference(given.x, given.weight)],
    cases=_cases(),
    controls=CONTROLS,
    bodies=lambda: [_bodies().single, _bodies().narrow, _bodies().expand],
)
