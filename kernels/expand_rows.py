"""Packed rows in, values out, in the order asked: dequantises and expands in one pass.

`expand_rows` launches the GPU's bodies, which are in row_bodies.py. `reference` does the same in plain torch, on any
device and without Triton.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazyio.errors import TableError, Unsupported
from lazyio.kernels.contract import Case, Kernel, bodies
from lazyio.ple.dtypes import EXL3_TYPES, TYPES

# As torch sees what is stored value by value.
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
# As the bodies load it.
_LOADED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.uint16}
# Places between the two values of a byte.
_NIBBLES = {
    **{"Q4_0": 16, "Q4_1": 16, "Q5_0": 16, "Q5_1": 16, "IQ4_NL": 16, "MXFP4": 16},
    **{"Q4_K": 32, "Q5_K": 32, "Q6_K": 64},
}

#: Stored types (`TableSpec.dtype`) that have a kernel and a reference; `LazyTable.decode` has others too, on the CPU.
SUPPORTED = frozenset({*_FLOATS, *_BYTES, *_NIBBLES, "Q8_0", *EXL3_TYPES})

# The reference rounds products before it adds to them.
_COMPILED = {"enable_fp_fusion": False}
# Values that a program makes. With so many, an H200 takes little longer than to copy as many bytes.
_TILE_VALUES = 4096


def expand_rows(
    packed: torch.Tensor,
    inverse: torch.Tensor,
    stored: str,
    out: torch.Tensor,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
) -> None:
    """out[i] = values of packed[inverse[i]] * scale + bias[head[i]], on the current stream; never waits.

    packed uint8 [unique, row_bytes], C-contiguous; inverse int64 [n], each below `unique`, which is not checked;
    `stored` the name of their type, one of SUPPORTED; out [n, row_values] float32, bfloat16 or float16, whose rows may
    lie apart; bias float32 [heads, row_values], with head int64 [n], or neither. Arithmetic is in float32, each step
    rounded to it, and the result is rounded to out's dtype.
    Raises Unsupported for a type without a kernel and where Triton is missing, TableError for what does not fit.
    """
    _check(packed, inverse, stored, out, bias, head)
    if not len(inverse):
        return
    body, decode, width, unit_values = _body(_bodies(), stored, out.shape[1])
    source = packed.view(_LOADED.get(stored, torch.uint8))
    words = packed.view(torch.uint16) if _word_bytes(stored) == 2 else packed
    units = _TILE_VALUES // unit_values
    body[(-(-len(inverse) * (out.shape[1] // unit_values) // units),)](
        *(source, words, inverse, out, out.stride(0), len(inverse)),
        *(1.0 if scale is None else scale, bias, head),
        DECODE=decode,
        ROW_UNITS=source.shape[1],
        ROW_VALUES=out.shape[1],
        WIDTH=width,
        UNITS=units,
        SCALED=scale is not None,
        BIASED=bias is not None,
        **_COMPILED,
    )


def reference(
    packed: torch.Tensor,
    inverse: torch.Tensor,
    stored: str,
    out: torch.Tensor,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
) -> None:
    """What `expand_rows` does, in plain torch and on any device, with the same arguments and errors.

    An inverse beyond `unique` raises IndexError on the CPU.
    """
    _check(packed, inverse, stored, out, bias, head)
    if not len(inverse):
        return
    values = _values(packed, stored).view(len(packed), out.shape[1])
    if scale is not None:
        values = values * scale
    if bias is None:
        out.copy_(values.to(out.dtype).index_select(0, inverse))
    else:
        assert head is not None
        out.copy_(values.index_select(0, inverse) + bias.index_select(0, head))


def _check(
    packed: torch.Tensor,
    inverse: torch.Tensor,
    stored: str,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    head: torch.Tensor | None,
) -> None:
    if stored not in SUPPORTED:
        raise Unsupported(f"rows of type {stored} have no kernel; LazyTable.decode turns them into values on the CPU")
    if packed.dtype != torch.uint8 or packed.ndim != 2 or not packed.is_contiguous():
        raise TableError(f"packed rows are C-contiguous uint8 [unique, row_bytes]; got {_described(packed)}")
    if packed.data_ptr() % _word_bytes(stored):
        raise TableError(
            f"packed rows of {stored} must start at a multiple of {_word_bytes(stored)} bytes in memory; these start "
            f"at {packed.data_ptr():#x}"
        )
    if inverse.dtype != torch.int64 or inverse.ndim != 1 or not inverse.is_contiguous():
        raise TableError(f"the inverse is contiguous int64 [n]; got {_described(inverse)}")
    wanted = (len(inverse), TYPES[stored].row_values(packed.shape[1]))
    if tuple(out.shape) != wanted or out.dtype not in _FLOATS.values() or (out.numel() and out.stride(1) != 1):
        raise TableError(
            f"out must be float32, bfloat16 or float16 {list(wanted)}, each row contiguous; got {_described(out)}"
        )
    if len(inverse) and not len(packed):
        raise TableError(f"{len(inverse)} rows are asked for, and there are none to take them from")
    if (bias is None) != (head is None):
        raise TableError("a bias needs the head of each row, and heads need a bias; only one of the two was given")
    if bias is not None and head is not None:
        _check_bias(bias, head, wanted)
    if any(other is not None and other.device != packed.device for other in (inverse, out, bias, head)):
        raise TableError(f"packed rows are on {packed.device}, and the inverse, out or the bias on another device")


def _word_bytes(stored: str) -> int:
    """What the largest load of the type takes; every row and block is a whole number of these."""
    if stored in _BYTES or stored == "MXFP4":
        return 1
    return 4 if stored == "F32" else 2


def _check_bias(bias: torch.Tensor, head: torch.Tensor, wanted: tuple[int, int]) -> None:
    if bias.dtype != torch.float32 or bias.ndim != 2 or bias.shape[1] != wanted[1] or not bias.is_contiguous():
        raise TableError(f"the bias is contiguous float32 [heads, {wanted[1]}]; got {_described(bias)}")
    if head.dtype != torch.int64 or tuple(head.shape) != wanted[:1] or not head.is_contiguous():
        raise TableError(f"heads are contiguous int64 [{wanted[0]}]; got {_described(head)}")


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with strides {list(tensor.stride())}"


def _bodies() -> Any:
    return bodies("row_bodies", "the row kernel")


def _body(module: Any, stored: str, row_values: int) -> tuple[Any, Any, int, int]:
    """The body of a type, what it decodes with, its WIDTH, and the values of a unit."""
    if stored in EXL3_TYPES:
        return module.exl3, int(stored.removeprefix("EXL3_K")), 8, 8
    if stored in _NIBBLES:
        return module.two_planes, getattr(module, stored.lower()), _NIBBLES[stored], 32
    decode = module.floats if stored in ("F32", "F16") else getattr(module, stored.lower())
    width = math.gcd(row_values, 32)
    return module.one_plane, decode, width, width


def _values(packed: torch.Tensor, stored: str) -> torch.Tensor:
    """Values of all rows in order, float32, in any shape. Sources: those of `lazyio.ple.codec`."""
    if stored in _FLOATS | _BYTES:
        return packed.view((_FLOATS | _BYTES)[stored]).float()
    if stored in EXL3_TYPES:
        return _exl3(packed, int(stored.removeprefix("EXL3_K")))
    return _BLOCKS[stored](packed.view(-1, TYPES[stored].block_bytes))


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def nibbles(codes: torch.Tensor, apart: int = 16) -> torch.Tensor:
    """Low halves of each `apart` bytes, then their high halves: uint8 [blocks, n] to [blocks, 2 n]."""
    runs = codes.view(len(codes), -1, 1, apart)
    return torch.cat([runs & 15, runs >> 4], 2).flatten(1)


def bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Each byte's parts of so many bits, lowest first: uint8 [..., n] to [..., n, 8 / bits]."""
    return codes[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device) & (1 << bits) - 1


def _looked_up(codes: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def _five_bits(block: torch.Tensor) -> torch.Tensor:
    return nibbles(block[:, 4:].contiguous()) | bits(block[:, :4], 1).flatten(1) << 4


def _q4_0(block: torch.Tensor) -> torch.Tensor:
    return _half(block[:, :2]) * (nibbles(block[:, 2:].contiguous()).float() - 8)


def _q4_1(block: torch.Tensor) -> torch.Tensor:
    return _half(block[:, :2]) * nibbles(block[:, 4:].contiguous()).float() + _half(block[:, 2:4])


def _q5_0(block: torch.Tensor) -> torch.Tensor:
    return _half(block[:, :2]) * (_five_bits(block[:, 2:]).float() - 16)


def _q5_1(block: torch.Tensor) -> torch.Tensor:
    return _half(block[:, :2]) * _five_bits(block[:, 4:]).float() + _half(block[:, 2:4])


def _q8_0(block: torch.Tensor) -> torch.Tensor:
    return block[:, 2:].view(torch.int8).float() * _half(block[:, :2])


def _iq4_nl(block: torch.Tensor) -> torch.Tensor:
    values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return _half(block[:, :2]) * _looked_up(nibbles(block[:, 2:].contiguous()), values)


def _mxfp4(block: torch.Tensor) -> torch.Tensor:
    exponent = block[:, :1].int()
    # Half of 2 ** (exponent - 127), since codes stand for twice their value; the two smallest are subnormal.
    half = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(torch.float32)
    doubled = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    return half * _looked_up(nibbles(block[:, 1:].contiguous()), doubled)


def _k_scales(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and least values of a block's 8 parts, [blocks, 8, 1] each."""
    first, second, third = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], 1)
    least = torch.cat([second & 63, third >> 4 | second >> 2 & 48], 1)
    return (_half(block[:, :2]) * scales.float())[..., None], (_half(block[:, 2:4]) * least.float())[..., None]


def _q4_k(block: torch.Tensor) -> torch.Tensor:
    scales, least = _k_scales(block)
    return scales * nibbles(block[:, 16:].contiguous(), 32).view(-1, 8, 32).float() - least


def _q5_k(block: torch.Tensor) -> torch.Tensor:
    scales, least = _k_scales(block)
    fifth = bits(block[:, 16:48], 1).transpose(1, 2) << 4
    return scales * (nibbles(block[:, 48:].contiguous(), 32).view(-1, 8, 32) | fifth).float() - least


def _q6_k(block: torch.Tensor) -> torch.Tensor:
    upper = bits(block[:, 128:192].view(-1, 2, 32), 2).transpose(2, 3).reshape(-1, 256)
    codes = nibbles(block[:, :128].contiguous(), 64) | upper << 4
    scales = _half(block[:, 208:]) * block[:, 192:208].view(torch.int8).float()
    return scales[..., None] * (codes.view(-1, 16, 16).float() - 32)


_BLOCKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4},
    **{"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}


def _exl3(packed: torch.Tensor, bits: int) -> torch.Tensor:
    first_bit = torch.arange(160, device=packed.device) * bits
    byte, shift = first_bit // 8, (first_bit % 8).int()
    following = (byte + 1).clamp(max=20 * bits - 1)
    # Temporaries of so many rows stay in the processor's caches.
    return torch.cat([_ring_values(rows, byte, following, shift, bits) for rows in torch.split(packed, 1024)])


def _ring_values(
    packed: torch.Tensor, byte: torch.Tensor, following: torch.Tensor, shift: torch.Tensor, bits: int
) -> torch.Tensor:
    ring = packed[:, 2:]
    pairs = ring.index_select(1, byte).int() | ring.index_select(1, following).int() << 8
    codes = pairs >> shift & (1 << bits) - 1
    states = codes
    for back in range(1, -(-16 // bits)):
        states = states | codes.roll(back, 1) << back * bits
    chosen = _codebook(packed.device).index_select(0, (states & 0xFFFF).flatten())
    return chosen.view(-1, 160) * _half(packed[:, :2])


@functools.cache
def _codebook(device: torch.device) -> torch.Tensor:
    """The code of each of the 65,536 states of EXL3's rings."""
    hashed = torch.arange(1 << 16, device=device) * 0x83DCD12D
    total = sum((hashed >> shift & 255 for shift in (0, 8, 16, 24)), torch.zeros_like(hashed))
    # The float16 of bits 0x1EEE and 0xC931; the product and the sum are exact.
    return ((total + 1024).float() * 0.00676727294921875 - 10.3828125).half().float()


@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `expand_rows` but `out`."""

    packed: torch.Tensor
    inverse: torch.Tensor
    stored: str
    scale: float | None = None
    bias: torch.Tensor | None = None
    head: torch.Tensor | None = None

    @classmethod
    def random(cls, device: torch.device, seed: int, stored: str, rows: int = 13, n: int = 33) -> Arguments:
        """Any bytes, and so any codes, scales and signs, infinite and subnormal ones among them; three heads."""
        # So many values that rows are no power of two of units, and their bytes often an odd multiple of 2.
        values = {1: 24, 32: 160, 160: 160, 256: 512}[TYPES[stored].block_values]
        made = torch.Generator().manual_seed(seed)
        packed = torch.randint(256, (rows, TYPES[stored].row_bytes(values)), generator=made, dtype=torch.uint8)
        inverse, head = torch.randint(rows, (n,), generator=made), torch.randint(3, (n,), generator=made)
        bias = torch.randn(3, values, generator=made).to(device)
        return cls(packed.to(device), inverse.to(device), stored, 0.3, bias, head.to(device))

    def results(self, function: Callable[..., None]) -> list[torch.Tensor]:
        """What `expand_rows` or `reference` writes, as float32 and as float16."""
        shape = (len(self.inverse), TYPES[self.stored].row_values(self.packed.shape[1]))
        dtypes, device = (torch.float32, torch.float16), self.packed.device
        outs = [torch.full(shape, math.nan, dtype=dtype, device=device) for dtype in dtypes]
        for out in outs:
            function(self.packed, self.inverse, self.stored, out, scale=self.scale, bias=self.bias, head=self.head)
        return outs


def _of_packed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda given: replace(given, packed=change(given.packed))


def _of_inverse(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda given: replace(given, inverse=change(given.inverse))


def _of_heads(given: Arguments) -> Arguments:
    assert given.bias is not None
    return replace(given, bias=given.bias.roll(1, 0))


#: Faults by name. Each changes arguments the way a body with that fault would see them, so that what it gives for
#: them is what a faulty body would give for the right ones. "heads" is for arguments that have them.
CONTROLS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "halves of bytes swapped": _of_packed(lambda packed: packed << 4 | packed >> 4),
    "rows one byte off": _of_packed(lambda packed: packed.flatten().roll(-1).view_as(packed)),
    "last bit lost": _of_packed(lambda packed: packed & 254),
    "inverse one off": _of_inverse(lambda inverse: inverse.roll(1)),
    "rows not expanded": _of_inverse(lambda inverse: torch.arange(len(inverse), device=inverse.device) % len(inverse)),
    "scale one step off": lambda given: replace(given, scale=(1.0 if given.scale is None else given.scale) * 1.0000002),
    "heads": _of_heads,
}

# One type of each body and of each way to decode that differs from the others in more than constants.
_PLANTED = {"F16", "Q8_0", "IQ4_NL", "Q6_K", "EXL3_K1"}

KERNEL = Kernel(
    name="expand_rows",
    run=lambda given: given.results(expand_rows),
    reference=lambda given: given.results(reference),
    cases=[
        *(
            Case(name, functools.partial(Arguments.random, stored=name), planted=name in _PLANTED)
            for name in sorted(SUPPORTED)
        ),
        *(
            Case(
                f"{name}, many",
                functools.partial(Arguments.random, stored=name, rows=29_000, n=32_768),
                compiled_only=True,
            )
            for name in sorted(SUPPORTED)
        ),
    ],
    controls=CONTROLS,
    bodies=lambda: [_bodies().one_plane, _bodies().two_planes, _bodies().exl3],
)
