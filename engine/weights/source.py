"""What the loader asks of a checkpoint, whatever its format."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lazyio.engine.weights.tiles import Tiles
from lazyio.ple.checkpoint import StoredTensor


@dataclass(frozen=True, slots=True)
class BlockScale:
    """Scales of an fp8 tensor [..., rows, columns]: each multiplies a block of its values, ragged at the edges.

    `stored` is [..., blocks of rows, blocks of columns], floats; dimensions of 1 may be missing or too many.
    """

    stored: StoredTensor
    block: tuple[int, int]  # rows, columns; those of the tensor itself where one scale is for all


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor whose values fill `into` of a parameter.

    `into` has one slice for each leading dimension of the parameter that is not filled whole; what it selects has the
    shape of `stored`, but for dimensions of 1. Quantised values are turned to float32. `change`, if there is one, is
    called once, with all values: float32 in the shape of `stored`, on the parameter's device. It may work in place and
    returns a tensor of that shape. `tiles` are there where it is theirs to undo, so that packed values can be moved.
    """

    stored: StoredTensor
    into: tuple[slice, ...] = ()
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    scale: BlockScale | None = None
    tiles: Tiles | None = None


class Source(abc.ABC):
    """A checkpoint: its configuration in transformers' form, and the stored tensors of each parameter.

    Opening it reads the configuration alone, which is all that dummy weights need; `parts` and `left_over` read
    headers, never data.
    """

    path: str
    #: The text part of config.json, with "model_type" as `models.model_class` knows it; made from metadata for GGUF.
    config: Mapping[str, Any]

    @abc.abstractmethod
    def parts(self, parameter: str, shape: tuple[int, ...]) -> list[Part]:
        """The stored tensors that fill a parameter of that shape, each value of it once.

        Raises ModelError naming the tensors that the checkpoint lacks, or a type or layout that can't be loaded. The
        loader compares shapes.
        """

    @abc.abstractmethod
    def left_over(self, parameters: Collection[str]) -> list[str]:
        """Names of stored tensors that no parameter and no table uses and that are not known to be of other parts.

        `parameters` are the names of all parameters, tied ones too.
        """
