"""The contract of a model."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn

from lazyio.engine.layers.linear import Embedding, Joined
from lazyio.engine.layers.packed import Weight
from lazyio.engine.state import Piece, State
from lazyio.engine.ubatch import Rows, Ubatch


class Stateful(Protocol):
    """A module that keeps a piece of each sequence's state: `span.state.pieces[self]`."""

    def new_piece(self, capacity: int, dtype: torch.dtype, device: torch.device) -> Piece:
        """The piece of a sequence that begins, with room for `capacity` tokens."""
        ...


class Model(nn.Module, abc.ABC):
    """A text model, its table left out.

    Parameters have the names and shapes that transformers gives them in a text-only model ("model.layers.0. ...",
    "lm_head.weight"). A model is built on the meta device, from the text part of a configuration in the form of
    transformers' config.json; the loader gives the parameters their values, or puts a `PackedWeight` in their place in
    modules that have their names in `packs`.
    """

    #: Name of the table's tensor in transformers, without which a checkpoint has none; the loader never reads it.
    table: str | None = None
    #: Parameters that are not loaded but are another one: {"lm_head.weight": "model.embed_tokens.weight"}.
    tied: Mapping[str, str]
    vocab: int
    max_tokens: int  # of a sequence, as the configuration says
    row_values: int  # of all rows of a token together; 0 without a table
    #: Token ids from this one on have row 0 of the table, where that has fewer rows than the vocabulary.
    row_vocab: int | None = None
    #: Parameters that stay in float32 whatever the model's dtype.
    float32: frozenset[str] = frozenset()

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """Build it on the current default device. Raises ModelError for a configuration that it can't follow."""

    @abc.abstractmethod
    def forward(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        """Hidden states [tokens, hidden] that `logits` turns into logits, and all states moved on.

        `rows` is None for a model without a table.
        """

    @abc.abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [n, hidden]: float32 [n, vocab]."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """In which hidden states are computed."""
        embedding = self.get_submodule("model.embed_tokens")
        assert isinstance(embedding, Embedding)
        return embedding.dtype

    @property
    def packable(self) -> list[str]:
        """Names of the parameters that may be held packed."""
        return [f"{place}.{name}" for place, module in self.named_modules() for name in _packs(module)]

    @property
    def joined(self) -> list[list[str]]:
        """Names of matrices that are multiplied by the same x, in the order in which they had best lie."""
        names = {module: name for name, module in self.named_modules()}
        groups = [one for module in self.modules() for one in vars(module).values() if isinstance(one, Joined)]
        return [[f"{names[layer]}.weight" for layer in one.layers] for one in groups]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that it holds, packed ones too."""
        values = {id(parameter): parameter.nbytes for parameter in self.parameters()}
        packed = {id(weight): weight.nbytes for weight in map(self.weight, self.packable)}
        return sum({**values, **packed}.values())

    def weight(self, parameter: str) -> Weight:
        """What it holds by the name of a parameter."""
        module, _, last = parameter.rpartition(".")
        weight: Weight = getattr(self.get_submodule(module), last)
        return weight

    def dtype_of(self, parameter: str, dtype: torch.dtype) -> torch.dtype:
        """That of a parameter in a model of `dtype`."""
        return torch.float32 if parameter in self.float32 else dtype

    def new_state(self, capacity: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> State:
        """The state of a sequence that begins, with room for `capacity` tokens, on the model's device, in its dtype.

        On another it is no use but for its size: the meta device tells that without taking memory. An outline of a
        model does not know its dtype.
        """
        stateful = [cast(Stateful, module) for module in self.modules() if hasattr(module, "new_piece")]
        pieces = {module: module.new_piece(capacity, dtype or self.dtype, device or self.device) for module in stateful}
        return State(pieces, capacity)

    def step(self, ubatch: Ubatch, rows: Rows | None) -> torch.Tensor:
        """`forward`, without gradients, with the tokens of each sequence counted."""
        with torch.inference_mode():
            hidden: torch.Tensor = self(ubatch, rows)
        for span in ubatch.spans:
            span.state.tokens += span.length
        return hidden


def _packs(module: nn.Module) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(module, "packs", ())
    return names
