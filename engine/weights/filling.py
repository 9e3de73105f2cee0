"""Stored tensors into parameters, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from lazyio.engine.layers.packed import cut
from lazyio.engine.weights.finite import check_packed, check_values
from lazyio.engine.weights.fp8 import FP8_TYPES, read_scale, scaled
from lazyio.engine.weights.reading import LANDING_BYTES, FileOnce, Landing
from lazyio.engine.weights.source import Part
from lazyio.kernels.packed import PackedWeight, pack_into
from lazyio.ple.codec import decode
from lazyio.ple.dtypes import TYPES

Box = tuple[slice, ...]  # a slice for each dimension; its values lie one after the other in the file

#: Stored types that torch has too.
_OF_TORCH = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    **FP8_TYPES,
}


def fill(parameter: torch.Tensor, part: Part, file: FileOnce, landing: Landing) -> None:
    """Read a part from its file, and give its place in the parameter its values, in the parameter's dtype.

    Raises ModelError where a quantised value is no finite number.
    """
    shape = part.stored.shape or (1,)
    target = parameter[part.into].view(shape)
    if part.change is None:
        _fill_whole(target, part, file, landing)
        return
    values = torch.empty(shape, dtype=torch.float32, device=parameter.device)
    _fill_whole(values, part, file, landing)
    target.copy_(part.change(values))


def fill_packed(weight: PackedWeight, part: Part, file: FileOnce, landing: Landing) -> None:
    """Read a part from its file and put its rows, packed as they are, in their place in the weight.

    Raises ModelError where a scale or value is no finite number.
    """
    own, stored, kind = cut(weight, part.into), part.stored, TYPES[weight.stored]
    row_bytes = kind.row_bytes(weight.shape[-1])
    columns = None if part.tiles is None or part.tiles.dim == 0 else part.tiles.of_elements(kind.block_values)
    # Regrouping takes a few times what is regrouped.
    for box, first in _boxes(own.shape[:-1], max(1, landing.piece_bytes // 4 // row_bytes)):
        sizes = [one.stop - one.start for one in box]
        with landing.piece(row_bytes * math.prod(sizes)) as piece:
            file.read_into(piece, stored.offset + row_bytes * first)
            raw = piece.view(*sizes, row_bytes).to(weight.device, non_blocking=True)
            if columns is not None:
                raw = columns.undo(raw.view(*sizes, -1, kind.block_bytes)).view(raw.shape)
            pack_into(cut(own, box), raw)
    if part.scale is not None:
        own.planes[1].copy_(read_scale(stored, part.scale, weight.device).view(own.planes[1].shape))
    check_packed(own, f"{stored.path}: {stored.name}")
    if part.tiles is not None and part.tiles.dim == 0:
        for plane in own.planes:
            plane.copy_(part.tiles.undo(plane))


def passing_bytes(parts: Iterable[Part]) -> int:
    """Bytes that filling from these parts, one after the other, takes for a while, on the device and on the host."""
    changed = [0, *(4 * math.prod(part.stored.shape) for part in parts if part.change is not None)]
    # A piece as it was read, decoded or on the device, as float32 with its scales, and their product.
    return 4 * LANDING_BYTES + 2 * max(changed)


def _fill_whole(target: torch.Tensor, part: Part, file: FileOnce, landing: Landing) -> None:
    stored, kind = part.stored, TYPES[part.stored.dtype]
    scales = None if part.scale is None else read_scale(stored, part.scale, target.device)
    for box, first in _boxes(tuple(target.shape), _values_at_once(part, landing)):
        sizes = [cut.stop - cut.start for cut in box]
        with landing.piece(kind.row_bytes(math.prod(sizes))) as piece:
            file.read_into(piece, stored.offset + kind.row_bytes(first))
            values = _values(piece, stored.dtype).view(sizes).to(target.device, non_blocking=True)
            if part.scale is not None and scales is not None:
                values = scaled(values, scales, part.scale.block, box)
            if not _plain(part):
                check_values(values, f"{stored.path}: {stored.name}", stored.dtype, stored.shape, first)
            target[box].copy_(values)


def _values(piece: torch.Tensor, stored: str) -> torch.Tensor:
    if stored in _OF_TORCH:
        return piece.view(_OF_TORCH[stored])
    return torch.from_numpy(decode(piece.numpy(), stored))


def _values_at_once(part: Part, landing: Landing) -> int:
    """As many as a piece holds, as stored and, where they become float32 on the way, as that."""
    return landing.piece_bytes // (TYPES[part.stored.dtype].block_bytes if _plain(part) else 4)


def _plain(part: Part) -> bool:
    """Whether values are as they are stored."""
    return part.stored.dtype in _OF_TORCH and part.scale is None


def _boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[Box, int]]:
    """Cut a tensor in boxes of at most `most` values, in the order they are stored, each with its first value."""
    inner = math.prod(shape[1:])
    if inner > most:
        for place in range(shape[0]):
            for box, first in _boxes(shape[1:], most):
                yield (slice(place, place + 1), *box), place * inner + first
        return
    step = most // inner
    rest = [slice(0, size) for size in shape[1:]]
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *rest), start * inner
