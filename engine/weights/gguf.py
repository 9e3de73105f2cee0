"""GGUF models as a source of parameters."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from lazyio.engine.weights.gguf_config import config_of
from lazyio.engine.weights.gguf_names import GgufNames, Stored
from lazyio.engine.weights.source import Part, Source
from lazyio.errors import ModelError
from lazyio.ple.checkpoint import StoredTensor
from lazyio.ple.gguf import open_gguf
from lazyio.ple.tables import is_ple_name

# Of other parts of a model, or what its configuration says as well.
_NOT_OF_THE_TRUNK = re.compile(r"rope_freqs\.weight|blk\.(?P<layer>\d+)\..+|(v|mm|a|nextn|mtp)\..+")


class GgufSource(Source):
    """A model in one GGUF file, or in all parts of a split one.

    Raises TableError for damaged files and missing parts, ModelError for an architecture that can't be run here.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._checkpoint = open_gguf(path)
        self.config = config_of(self._checkpoint)
        self._names = GgufNames(self.config)

    def parts(self, parameter: str, shape: tuple[int, ...]) -> list[Part]:
        """The stored tensors of a parameter, in whichever way the file has it."""
        ways = self._names.of(parameter)
        for way in ways:
            if all(stored.name in self._checkpoint.names for stored in way):
                return [self._part(stored) for stored in way]
        lacking = [stored.name for stored in ways[0] if stored.name not in self._checkpoint.names] if ways else []
        raise ModelError(f"{self.path} lacks {' and '.join(lacking) or 'any tensor'} for the parameter {parameter}")

    def left_over(self, parameters: Collection[str]) -> list[str]:
        """Names of stored tensors that no parameter uses and that belong to no other part of the model."""
        used = {stored.name for parameter in parameters for way in self._names.of(parameter) for stored in way}
        return [name for name in self._checkpoint.names if name not in used and not self._is_of_another_part(name)]

    def _is_of_another_part(self, name: str) -> bool:
        if is_ple_name(name):
            return True
        other = _NOT_OF_THE_TRUNK.fullmatch(name)
        # Blocks behind the last layer predict further tokens.
        return other is not None and (other["layer"] is None or int(other["layer"]) >= self.config["num_hidden_layers"])

    def _part(self, stored: Stored) -> Part:
        tensor = self._checkpoint.tensor(stored.name)
        own = tensor if stored.place is None else _entry(tensor, stored.place)
        return Part(own, stored.into, stored.undo, tiles=stored.tiles)


def _entry(tensor: StoredTensor, place: int) -> StoredTensor:
    """One entry of the first dimension, as a tensor of its own."""
    count = tensor.shape[0]
    if place >= count or tensor.size_bytes is None:
        raise ModelError(f"{tensor.path}: tensor {tensor.name} has {count} entries, and number {place} is needed")
    each = tensor.size_bytes // count
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + place * each, size_bytes=each)
