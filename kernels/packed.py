"""Quantised weights as kernels take them: the bytes of GGUF's blocks regrouped in planes, and fp8 with its scales.

Blocks of 18 to 210 bytes are badly aligned for wide loads. So what a kernel loads together lies together here: of each
row all codes, all high bits, all scales. Nothing is lost, and a weight grows by less than 3 %, since the 6-bit scales
of Q4_K and Q5_K become bytes. `_PLANES` has the planes of each type, and packed_tiles.py reads them on a GPU.

    codes   two of 4 bits in a byte, neighbours, the first in its low half; else one in a byte
    high    what a code has above its 4 bits, of 32 codes (Q5) or of 16 (Q6), the first in the lowest bits of a word
    scales  one a group: float16; or scale and least value, float16 both, in the low and the high half of a word
    within K-quants, scales are integers (with the least value in the high byte) of which a block of 256 has the unit
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lazyio.errors import ModelError, Unsupported
from lazyio.kernels.expand_rows import bits, nibbles
from lazyio.ple.dtypes import TYPES

_WORD, _HALF = torch.int32, torch.float16
_CODES, _HIGH = (2, torch.uint8), (32, _WORD)

# Of each plane: how many values of a row an element is for, and its dtype.
_PLANES: dict[str, tuple[tuple[int, torch.dtype], ...]] = {
    "Q8_0": ((1, torch.int8), (32, _HALF)),
    "Q4_0": (_CODES, (32, _HALF)),
    "IQ4_NL": (_CODES, (32, _HALF)),
    "Q4_1": (_CODES, (32, _WORD)),
    "Q5_0": (_CODES, _HIGH, (32, _HALF)),
    "Q5_1": (_CODES, _HIGH, (32, _WORD)),
    "Q4_K": (_CODES, (32, torch.int16), (256, _WORD)),
    "Q5_K": (_CODES, _HIGH, (32, torch.int16), (256, _WORD)),
    "Q6_K": (_CODES, (16, _WORD), (16, torch.int8), (256, _HALF)),
}
_FP8 = "F8_E4M3"
_HAS_HIGH = ("Q5_0", "Q5_1", "Q5_K", "Q6_K")

#: Stored types that can be kept packed.
PACKED_TYPES = frozenset({*_PLANES, _FP8})

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs], or one of each expert, [experts, outputs, inputs].

    Planes are contiguous but for views of rows. fp8 weights have one float32 scale for each `block` (rows, columns),
    ragged at the edges.
    """

    stored: str
    shape: tuple[int, ...]
    planes: tuple[torch.Tensor, ...]  # those of `plane_shapes`
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return self.planes[0].device

    def to(self, device: torch.device) -> PackedWeight:
        """The same on another device."""
        return replace(self, planes=tuple(plane.to(device) for plane in self.planes))

    def __getitem__(self, expert: int) -> PackedWeight:
        """The weight of one expert, in the same memory."""
        assert len(self.shape) == 3, "the weight has no experts"
        return replace(self, shape=self.shape[1:], planes=tuple(plane[expert] for plane in self.planes))

    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, high bits, scales and units as kernels take them; the codes stand in for what a type lacks."""
        codes, *rest = self.planes
        high = rest.pop(0) if self.stored in _HAS_HIGH else codes
        return codes, high, rest[0], rest[1] if len(rest) > 1 else codes


def plane_shapes(
    stored: str, shape: Sequence[int], block: tuple[int, int] | None = None
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the planes of a weight [..., outputs, inputs]: no data is looked at.

    Raises Unsupported for a type that can't be kept packed, ModelError for rows that are no whole number of blocks and
    for fp8 without a block size.
    """
    if stored not in PACKED_TYPES:
        raise Unsupported(
            f"weights of type {stored} can't be kept packed, only {', '.join(sorted(PACKED_TYPES))}: dequantise them"
        )
    *leading, inputs = shape
    if stored == _FP8:
        if block is None or min(block) < 1:
            raise ModelError(
                f"a weight of {stored} {list(shape)} needs the rows and columns of its scales; got {block}"
            )
        blocks = (*leading[:-1], math.ceil(leading[-1] / block[0]), math.ceil(inputs / block[1]))
        return [(tuple(shape), torch.uint8), (blocks, torch.float32)]
    if inputs % TYPES[stored].block_values:
        raise ModelError(
            f"a weight {list(shape)} can't be {stored}: rows of {inputs} values are no whole number of blocks of "
            f"{TYPES[stored].block_values}"
        )
    return [((*leading, inputs // values), dtype) for values, dtype in _PLANES[stored]]


def empty(
    stored: str, shape: Sequence[int], device: torch.device, block: tuple[int, int] | None = None
) -> PackedWeight:
    """A weight to be filled by `pack_into`; errors are those of `plane_shapes`."""
    shapes = plane_shapes(stored, shape, block)
    planes = tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in shapes)
    return PackedWeight(stored, tuple(shape), planes, block if stored == _FP8 else None)


def pack_into(weight: PackedWeight, raw: torch.Tensor, first_row: int = 0) -> None:
    """Fill the rows of `weight` from `first_row` on with rows as they are stored.

    raw: uint8 [..., rows, row_bytes] with the leading dimensions of the weight, on any device: it is regrouped there,
    in temporaries of a few times its size. fp8 values have their scales apart: copy these to `weight.planes[1]`.
    """
    *leading, outputs, inputs = weight.shape
    rows = raw.shape[-2]
    wanted = (*leading, rows, TYPES[weight.stored].row_bytes(inputs))
    assert raw.dtype == torch.uint8, "stored rows are uint8"
    assert tuple(raw.shape) == wanted, f"rows of {weight.stored} are {wanted}, not {tuple(raw.shape)}"
    assert 0 <= first_row <= outputs - rows, "rows beyond the weight"
    split = _SPLIT.get(weight.stored)
    parts = split(raw.reshape(-1, TYPES[weight.stored].block_bytes)) if split else [raw]
    for plane, part in zip(weight.planes, parts, strict=False):
        plane[..., first_row : first_row + rows, :] = part.reshape(*leading, rows, plane.shape[-1])


def pack(
    raw: torch.Tensor,
    stored: str,
    shape: Sequence[int],
    scales: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> PackedWeight:
    """All rows, uint8 [..., outputs, row_bytes], on their device; fp8 with its float32 `scales`, one a block."""
    weight = empty(stored, shape, raw.device, block)
    pack_into(weight, raw)
    if stored == _FP8:
        assert scales is not None, "fp8 needs scales"
        weight.planes[1].copy_(scales)
    return weight


# --- blocks to planes: uint8 [blocks, block_bytes] to [blocks, elements] each ----------------------------------------


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes in order, uint8 [blocks, n], as neighbours in a byte each; what they have above 4 bits is left out."""
    return codes[:, ::2] & 15 | codes[:, 1::2] << 4


def _as(dtype: torch.dtype, some: torch.Tensor) -> torch.Tensor:
    return some.contiguous().view(dtype)


def _words(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes in order, uint8 [blocks, n] and below 2 ** width, as the bits of bytes, and those as words."""
    each = codes.view(len(codes), -1, 8 // width) << torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return _as(_WORD, each.sum(-1, dtype=torch.uint8))


def _split_simple(scale_bytes: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Q4_0, Q4_1, IQ4_NL: scales, then codes."""
    dtype = _HALF if scale_bytes == 2 else _WORD
    return lambda block: [_pairs(nibbles(block[:, scale_bytes:].contiguous())), _as(dtype, block[:, :scale_bytes])]


def _split_five(scale_bytes: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Q5_0, Q5_1: scales, fifth bits, codes."""
    simple = _split_simple(scale_bytes)

    def split(block: torch.Tensor) -> list[torch.Tensor]:
        fifth = block[:, scale_bytes : scale_bytes + 4]
        codes, scales = simple(torch.cat([block[:, :scale_bytes], block[:, scale_bytes + 4 :]], 1))
        return [codes, _as(_WORD, fifth), scales]

    return split


def _split_q8_0(block: torch.Tensor) -> list[torch.Tensor]:
    return [block[:, 2:].view(torch.int8), _as(_HALF, block[:, :2])]


def _k_scales(block: torch.Tensor) -> list[torch.Tensor]:
    """The scales and least values of a block's 8 parts, a byte each, and the units of both."""
    first, second, third = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], 1)
    least = torch.cat([second & 63, third >> 4 | second >> 2 & 48], 1)
    return [_as(torch.int16, torch.stack([scales, least], -1)).flatten(1), _as(_WORD, block[:, :4])]


def _split_q4_k(block: torch.Tensor) -> list[torch.Tensor]:
    return [_pairs(nibbles(block[:, 16:].contiguous(), 32)), *_k_scales(block)]


def _split_q5_k(block: torch.Tensor) -> list[torch.Tensor]:
    fifth = bits(block[:, 16:48], 1).transpose(1, 2).flatten(1)
    return [_pairs(nibbles(block[:, 48:].contiguous(), 32)), _words(fifth, 1), *_k_scales(block)]


def _split_q6_k(block: torch.Tensor) -> list[torch.Tensor]:
    upper = bits(block[:, 128:192].view(-1, 2, 32), 2).transpose(2, 3).reshape(-1, 256)
    codes = _pairs(nibbles(block[:, :128].contiguous(), 64))
    return [codes, _words(upper, 2), block[:, 192:208].view(torch.int8), _as(_HALF, block[:, 208:])]


_SPLIT: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    **{"Q4_0": _split_simple(2), "IQ4_NL": _split_simple(2), "Q4_1": _split_simple(4)},
    **{"Q5_0": _split_five(2), "Q5_1": _split_five(4), "Q8_0": _split_q8_0},
    **{"Q4_K": _split_q4_k, "Q5_K": _split_q5_k, "Q6_K": _split_q6_k},
}


# --- planes to values ------------------------------------------------------------------------------------------------


def reference_dequantise(weight: PackedWeight) -> torch.Tensor:
    """Values, float32 [..., outputs, inputs], in plain torch on any device: the bits of `gguf.quants.dequantize`."""
    if weight.stored == _FP8:
        return _fp8_values(weight)
    _, _, scales, units = weight.pointers()
    codes = _whole_codes(weight)
    groups = codes.view(*codes.shape[:-1], scales.shape[-1], -1)
    if weight.stored in ("Q4_1", "Q5_1"):
        scale, least = _two_halves(scales)
        return (scale * groups.float() + least).flatten(-2)
    if weight.stored in ("Q4_K", "Q5_K"):
        unit, least_unit = (_repeated(one, 8) for one in _two_halves(units))
        scale, least = unit * (scales & 255)[..., None], least_unit * (scales >> 8)[..., None]
        return (scale * groups.float() - least).flatten(-2)
    if weight.stored == "Q6_K":
        return (_repeated(units.float()[..., None], 16) * scales[..., None] * (groups.float() - 32)).flatten(-2)
    if weight.stored == "IQ4_NL":
        listed = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=codes.device)
        return (scales.float()[..., None] * listed[groups.int()]).flatten(-2)
    zero = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}[weight.stored]
    return (scales.float()[..., None] * (groups.float() - zero)).flatten(-2)


def _whole_codes(weight: PackedWeight) -> torch.Tensor:
    """With their high bits: [..., outputs, inputs], int8 for Q8_0 and uint8 for others."""
    codes, high, _, _ = weight.pointers()
    if weight.stored == "Q8_0":
        return codes
    low = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if weight.stored not in _HAS_HIGH:
        return low
    upper = bits(high.view(torch.uint8), 2 if weight.stored == "Q6_K" else 1).flatten(-2)
    return low | upper << 4


def _two_halves(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two float16 of each word, float32 [..., n, 1] each."""
    low, high = words.view(_HALF).float().view(*words.shape, 2).unbind(-1)
    return low[..., None], high[..., None]


def _repeated(units: torch.Tensor, groups: int) -> torch.Tensor:
    """[..., blocks, 1] as [..., groups of all blocks, 1]."""
    return units.repeat_interleave(groups, -2)


def _fp8_values(weight: PackedWeight) -> torch.Tensor:
    codes, scales = weight.planes
    assert weight.block is not None
    for dimension, size in zip((-2, -1), weight.block, strict=True):
        number = torch.arange(weight.shape[dimension], device=codes.device) // size
        scales = scales.index_select(dimension, number)
    return codes.view(torch.float8_e4m3fn).float() * scales


def check_finite(weight: PackedWeight, name: str) -> None:
    """Raise ModelError, naming the tensor and the first row, if a scale is NaN or infinite. Waits for the device."""
    for plane in weight.planes[1:]:
        paired = plane.dtype == _WORD and plane is not weight.pointers()[1]
        floats = plane.view(_HALF) if paired else plane
        if floats.is_floating_point() and not bool((finite := floats.isfinite()).all()):
            place = (~finite).nonzero()[0].tolist()
            row = place[-2] * (weight.block[0] if weight.block else 1)
            expert = f" of expert {place[0]}" if len(place) == 3 else ""
            raise ModelError(
                f"{name} ({weight.stored} {list(weight.shape)}) has a scale that is {floats[tuple(place)].item()}, in "
                f"row {row}{expert}: the file is damaged, or was made from a model with such values; get it anew"
            )


# --- random weights --------------------------------------------------------------------------------------------------


def random(
    stored: str,
    shape: Sequence[int],
    device: torch.device,
    generator: torch.Generator,
    std: float,
    block: tuple[int, int] | None = None,
) -> PackedWeight:
    """Random codes and scales, on the device: values of about this standard deviation around 0, all finite.

    `generator` is one of the device. Raises what `plane_shapes` does.
    """
    weight = empty(stored, shape, device, (128, 128) if block is None else block)
    codes, high, scales, units = weight.pointers()
    for plane in {codes.data_ptr(): codes, high.data_ptr(): high}.values():
        plane.view(torch.uint8).random_(0, 256, generator=generator)
    if stored == _FP8:
        _without_nan(codes)
    unit = std / _spread(stored)
    if stored in ("Q4_K", "Q5_K"):
        # Sums of a scale's square are about 48 squared. The least value is half a code's range, of the same scale.
        scales.random_(32, 64, generator=generator).mul_(257)
        _fill_pairs(units, unit / 48.4, unit / 48.4 * _middle(stored))
    elif stored == "Q6_K":
        scales.random_(32, 128, generator=generator)
        units.fill_(unit / 84.1)
    elif scales.dtype == _WORD:
        _fill_pairs(scales, unit, -unit * _middle(stored))
    else:
        scales.uniform_(0.5, 1.5, generator=generator).mul_(unit / 1.04)
    return weight


def _fill_pairs(words: torch.Tensor, low: float, high: float) -> None:
    words.fill_(int(torch.tensor([low, high], dtype=_HALF).view(_WORD).item()))


def _without_nan(codes: torch.Tensor) -> None:
    for part in torch.split(codes.view(-1), 1 << 26):
        part[(part & 127) == 127] = 0


def _middle(stored: str) -> float:
    return 7.5 if stored.startswith("Q4") else 15.5


def _spread(stored: str) -> float:
    """The root of the mean square of what scales multiply, if all codes are as likely."""
    if stored == _FP8:
        codes = torch.arange(256, dtype=torch.uint8)
        _without_nan(codes)
        values = codes.view(torch.float8_e4m3fn).float()
    elif stored == "IQ4_NL":
        values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    else:
        return math.sqrt((4.0 ** int(stored[1]) - 1) / 12)
    return values.square().mean().sqrt().item()
