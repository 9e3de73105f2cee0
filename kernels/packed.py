"""Quantised weights as kernels take them: the bytes of GGUF's blocks regrouped in planes, and fp8 with its scales.

Blocks of 18 to 210 bytes are badly aligned for wide loads. So what a kernel loads together lies together here: of each
row all codes, all high bits, all scales. Nothing is lost, and a weight grows by less than 3 %, since the 6-bit scales
of Q4_K and Q5_K become bytes. `_PLANES` has the planes of each type, and packed_tiles.py reads them on a GPU.

    codes   of 4 bits 64 in 8 words, of 8 bits 32: word j has codes 16 p + 2 j in its lower half, and those that follow
            on them in its upper half, in the order of p. So one mask takes a pair of neighbours out of it, with room
            for the exponents that make floats of both. Rows are filled up to a whole number of 64
    high    what codes have above 4 bits, of each word: 4 bits or 4 pairs of bits for its lower half, then for its upper
    scales  one a group: float16; or scale and least value, float16 both, in the low and the high half of a word
    units   K-quants' scales are integers (with the least value in the high byte) of which a block of 256 has the unit
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from lazyio.errors import ModelError, Unsupported
from lazyio.kernels.expand_rows import bits, nibbles
from lazyio.ple.dtypes import TYPES

_WORD, _HALF = torch.int32, torch.float16
_CODES, _HIGH = (8, _WORD), (16, torch.int16)

# Of each plane: how many values of a row an element is for, and its dtype.
_PLANES: dict[str, tuple[tuple[int, torch.dtype], ...]] = {
    "Q8_0": ((4, _WORD), (32, _HALF)),
    "Q4_0": (_CODES, (32, _HALF)),
    "IQ4_NL": (_CODES, (32, _HALF)),
    "Q4_1": (_CODES, (32, _WORD)),
    "Q5_0": (_CODES, _HIGH, (32, _HALF)),
    "Q5_1": (_CODES, _HIGH, (32, _WORD)),
    "Q4_K": (_CODES, (32, torch.int16), (256, _WORD)),
    "Q5_K": (_CODES, _HIGH, (32, torch.int16), (256, _WORD)),
    "Q6_K": (_CODES, (8, torch.int16), (16, torch.int8), (256, _HALF)),
}
_FP8 = "F8_E4M3"
_BYTES = ("Q8_0", _FP8)
# Bits that codes have above 4.
_HIGH_BITS = {"Q5_0": 1, "Q5_1": 1, "Q5_K": 1, "Q6_K": 2}
# Values of the words that hold their codes together.
_WHOLE = 64

#: Stored types that can be kept packed.
PACKED_TYPES = frozenset({*_PLANES, _FP8})

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    # What every product asks for, so it is found once.
    contiguous: bool = field(init=False, repr=False, compare=False)  # whether all planes are
    _pointers: _Four = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        codes, *rest = self.planes
        high = rest.pop(0) if self.stored in _HIGH_BITS else codes
        pointers = codes, high, rest[0], rest[1] if len(rest) > 1 else codes
        object.__setattr__(self, "_pointers", pointers)
        object.__setattr__(self, "contiguous", all(plane.is_contiguous() for plane in self.planes))

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

    @property
    def shares_scales(self) -> bool:
        """Whether 32 neighbours in a row have one scale at most: all but fp8 with odd blocks."""
        return self.block is None or self.block[1] % 32 == 0 or self.block[1] >= self.shape[-1]

    def pointers(self) -> _Four:
        """Codes, high bits, scales and units as kernels take them; the codes stand in for what a type lacks."""
        return self._pointers


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
        return [((*leading, -(-inputs // _WHOLE) * _WHOLE // 4), _WORD), (blocks, torch.float32)]
    if inputs % TYPES[stored].block_values:
        raise ModelError(
            f"a weight {list(shape)} can't be {stored}: rows of {inputs} values are no whole number of blocks of "
            f"{TYPES[stored].block_values}"
        )
    of_codes = 2 if stored in _HIGH_BITS else 1
    whole = -(-inputs // _WHOLE) * _WHOLE
    columns = [whole if place < of_codes else inputs for place in range(len(_PLANES[stored]))]
    return [((*leading, n // values), dtype) for n, (values, dtype) in zip(columns, _PLANES[stored], strict=True)]


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
    if weight.stored == _FP8:
        parts = _code_planes(_FP8, raw.reshape(-1, inputs))
    else:
        codes, *scales = _SPLIT[weight.stored](raw.reshape(-1, TYPES[weight.stored].block_bytes))
        parts = [*_code_planes(weight.stored, codes.reshape(-1, inputs)), *scales]
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


def step_pieces(weight: PackedWeight, inputs: int, slots: int = 1) -> tuple[int, int]:
    """Pieces (see packed_vectors.py) of a step of up to so many inputs, over rows of so many slots; and the steps."""
    words = weight.planes[0].shape[-1] * slots
    pieces = min(inputs // 32, 1 << (words // 4 - 1).bit_length())
    return pieces, -(-words // (4 * pieces))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x where 8 bytes of it can be loaded at a time, as they are where there are few rows: itself, or a copy."""
    return x.clone() if x.data_ptr() % 8 else x


# --- blocks to planes ------------------------------------------------------------------------------------------------


def _code_planes(stored: str, codes: torch.Tensor) -> list[torch.Tensor]:
    """Codes in their order, [rows, inputs], as planes of low and high bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _WHOLE))
    places = padded.view(len(codes), -1, 2 if stored in _BYTES else 4, 8, 2).permute(0, 1, 3, 4, 2)
    if stored in _BYTES:
        return [_as(_WORD, places.flatten(-2))]
    low = places & 15  # [rows, groups of 64, words, halves, codes]
    planes = [_as(_WORD, (low[..., ::2] | low[..., 1::2] << 4).flatten(-2))]
    if stored in _HIGH_BITS:
        width = _HIGH_BITS[stored]
        shift = torch.arange(4, dtype=torch.uint8, device=codes.device) * width
        half = (places >> 4 << shift).sum(-1, dtype=torch.uint8)
        planes.append(_as(torch.int16, (half[..., 0] | half[..., 1] << 4) if width == 1 else half))
    return planes


def _as(dtype: torch.dtype, some: torch.Tensor) -> torch.Tensor:
    return some.contiguous().view(dtype)


# Of blocks uint8 [blocks, block_bytes]: the codes of each, in their order, and planes of scales and units.


def _split_four(scale_bytes: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Q4_0, Q4_1, IQ4_NL: scales, then codes."""
    dtype = _HALF if scale_bytes == 2 else _WORD
    return lambda block: [nibbles(block[:, scale_bytes:].contiguous()), _as(dtype, block[:, :scale_bytes])]


def _split_five(scale_bytes: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Q5_0, Q5_1: scales, fifth bits, codes."""
    dtype = _HALF if scale_bytes == 2 else _WORD

    def split(block: torch.Tensor) -> list[torch.Tensor]:
        fifth = bits(block[:, scale_bytes : scale_bytes + 4], 1).flatten(1)
        return [nibbles(block[:, scale_bytes + 4 :].contiguous()) | fifth << 4, _as(dtype, block[:, :scale_bytes])]

    return split


def _split_q8_0(block: torch.Tensor) -> list[torch.Tensor]:
    return [block[:, 2:], _as(_HALF, block[:, :2])]


def _k_scales(block: torch.Tensor) -> list[torch.Tensor]:
    """The scales and least values of a block's 8 parts, a byte each, and the units of both."""
    first, second, third = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], 1)
    least = torch.cat([second & 63, third >> 4 | second >> 2 & 48], 1)
    return [_as(torch.int16, torch.stack([scales, least], -1)).flatten(1), _as(_WORD, block[:, :4])]


def _split_q4_k(block: torch.Tensor) -> list[torch.Tensor]:
    return [nibbles(block[:, 16:].contiguous(), 32), *_k_scales(block)]


def _split_q5_k(block: torch.Tensor) -> list[torch.Tensor]:
    fifth = bits(block[:, 16:48], 1).transpose(1, 2).flatten(1)
    return [nibbles(block[:, 48:].contiguous(), 32) | fifth << 4, *_k_scales(block)]


def _split_q6_k(block: torch.Tensor) -> list[torch.Tensor]:
    upper = bits(block[:, 128:192].view(-1, 2, 32), 2).transpose(2, 3).reshape(-1, 256)
    codes = nibbles(block[:, :128].contiguous(), 64) | upper << 4
    return [codes, block[:, 192:208].view(torch.int8), _as(_HALF, block[:, 208:])]


_SPLIT: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    **{"Q4_0": _split_four(2), "IQ4_NL": _split_four(2), "Q4_1": _split_four(4)},
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
    groups = codes.reshape(*codes.shape[:-1], scales.shape[-1], -1)
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
    """With their high bits, in order: [..., outputs, inputs], int8 for Q8_0 and uint8 for others."""
    codes, high, _, _ = weight.pointers()
    leading, inputs, some = weight.shape[:-1], weight.shape[-1], codes.contiguous().view(torch.uint8)
    if weight.stored in _BYTES:
        places = some.view(*leading, some.shape[-1] // 32, 8, 2, 2)
    else:
        places = bits(some, 4).view(*leading, some.shape[-1] // 32, 8, 2, 4)
    if weight.stored in _HIGH_BITS:
        upper = bits(high.contiguous().view(torch.uint8), _HIGH_BITS[weight.stored])
        places = places | upper.view(places.shape) << 4
    found = places.movedim(-1, -3).flatten(-4)[..., :inputs]
    return found.view(torch.int8) if weight.stored == "Q8_0" else found


def _two_halves(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two float16 of each word, float32 [..., n, 1] each."""
    low, high = words.view(_HALF).float().view(*words.shape, 2).unbind(-1)
    return low[..., None], high[..., None]


def _repeated(units: torch.Tensor, groups: int) -> torch.Tensor:
    """[..., blocks, 1] as [..., groups of all blocks, 1]."""
    return units.repeat_interleave(groups, -2)


def _fp8_values(weight: PackedWeight) -> torch.Tensor:
    codes, scales = _whole_codes(weight), weight.planes[1]
    assert weight.block is not None
    for dimension, size in zip((-2, -1), weight.block, strict=True):
        number = torch.arange(weight.shape[dimension], device=codes.device) // size
        scales = scales.index_select(dimension, number)
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scales


# --- random weights --------------------------------------------------------------------------------------------------


def random(
    stored: str,
    shape: Sequence[int],
    device: torch.device,
    generator: torch.Generator,
    std: float,
    block: tuple[int, int] | None = None,
) -> PackedWeight:
    """A weight of random values, those of `fill_random`. Raises what `plane_shapes` does."""
    weight = empty(stored, shape, device, (128, 128) if block is None else block)
    fill_random(weight, generator, std)
    return weight


def fill_random(weight: PackedWeight, generator: torch.Generator, std: float) -> None:
    """Random codes and scales, on the device: values of about this standard deviation around 0, all finite.

    `generator` is one of the device.
    """
    stored = weight.stored
    codes, high, scales, units = weight.pointers()
    for plane in {codes.data_ptr(): codes, high.data_ptr(): high}.values():
        plane.view(torch.uint8).random_(0, 256, generator=generator)
    if stored == _FP8:
        _without_nan(codes.view(torch.uint8))
    # What follows multiplies the spread: scales of 1/2 to 3/2 by 1.04, those of 32 to 63 by 48.4, of 32 to 127 by 84.1.
    unit = std / _spread(stored) / 1.04
    if stored in ("Q4_K", "Q5_K"):
        scales.random_(32, 64, generator=generator).mul_(257)
        _fill_pairs(units, unit / 48.4, _middle(stored), generator)
    elif stored == "Q6_K":
        scales.random_(32, 128, generator=generator)
        units.uniform_(0.5, 1.5, generator=generator).mul_(unit / 84.1)
    elif scales.dtype == _WORD:
        _fill_pairs(scales, unit, -_middle(stored), generator)
    else:
        scales.uniform_(0.5, 1.5, generator=generator).mul_(unit)


def _fill_pairs(words: torch.Tensor, unit: float, middle: float, generator: torch.Generator) -> None:
    """Scales, and least values that are so many times the scale."""
    low, high = words.view(_HALF).view(*words.shape, 2).unbind(-1)
    low.uniform_(0.5, 1.5, generator=generator).mul_(unit)
    high.copy_(low).mul_(middle)


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
