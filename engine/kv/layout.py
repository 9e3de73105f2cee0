"""What a page has in it and what a run has, as the pieces of a model's state say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazyio.engine.kv.pool import PAGE
from lazyio.engine.models.base import Model
from lazyio.errors import Unsupported

# Where a plane or a part begins, in bytes: kernels load from there as widely as they can.
_ALIGNED = 256
# A model without anything that grows still has its state in pages, which should not be too many.
_LEAST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of that shape and dtype, so many bytes from the start of a page or a run."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """The planes of a page, each [entries, ...] of its 256 positions, and the parts of a run, in bytes.

    Both are in the order of the pieces in `template`, the state of one page's tokens without memory. Raises Unsupported
    for a model whose entries do not fill a page evenly. An outline of a model needs the `dtype` that it will have.
    """

    def __init__(self, model: Model, dtype: torch.dtype | None = None) -> None:
        self.template = model.new_state(PAGE, torch.device("meta"), dtype)
        found = _Measuring()
        for piece in self.template.pieces.values():
            piece.placed(found)
        self.planes, self.parts = tuple(found.planes.places), tuple(found.parts.places)
        self.page_bytes = found.planes.size_bytes or _LEAST_BYTES
        self.run_pages = -(-found.parts.size_bytes // self.page_bytes)


class _Places:
    """Tensors one behind the other."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.size_bytes = 0

    def add(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        place = Place(self.size_bytes, tuple(shape), dtype)
        self.places.append(place)
        self.size_bytes += -(-place.nbytes // _ALIGNED) * _ALIGNED


class _Measuring:
    """Places that note what they are asked for. Keys that reach back a window do not grow: they belong to the run."""

    def __init__(self) -> None:
        self.planes, self.parts = _Places(), _Places()

    def growing(self, entries: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        if not entries or PAGE % entries:
            raise Unsupported(
                f"pages of {PAGE} positions can't hold {entries} entries each of a piece of this model evenly: set "
                "kv_pages to off"
            )
        self.planes.add((entries, *shape), dtype)

    def sliding(self, reach: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
        self.parts.add((reach, *shape), dtype)

    def recent(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        self.parts.add(shape, dtype)

    def recurrent(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        self.parts.add(shape, dtype)
