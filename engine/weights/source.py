"""What the loader asks of a checkpoint, whatever its format."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazyio.ple.checkpoint import StoredTensor


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor that fills `into` of a parameter: dequantised to float32 or as it is, then changed, then copied.

    `scales`, if any, are the stored tensors that dequantising needs beside it.
    """

    stored: StoredTensor
    into: tuple[slice, ...] = ()
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    scales: Sequence[StoredTensor] = ()


class Source(abc.ABC):
    """A checkpoint: its configuration in transformers' form, and the stored tensors of each parameter."""

    path: str
    #: The text part of config.json, with "model_type" as `models.model_class` knows it; made from metadata for GGUF.
    config: Mapping[str, Any]

    @abc.abstractmethod
    def parts(self, parameter: str, shape: tuple[int, ...]) -> list[Part]:
        """The stored tensors that make up a parameter. Raises ModelError where it is missing or misshapen."""

    @abc.abstractmethod
    def left_over(self, parameters: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Names of stored tensors that no parameter and no table uses and that are not known to be of other parts."""
