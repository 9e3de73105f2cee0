"""The order in which GGUF files have the value heads of gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """Value heads by the key head that they share: grouped in transformers, one of each key head in turn in GGUF.

    Entry [k * shared + r] becomes entry [r * key_heads + k], each `wide` long, behind the first `before` of `dim`.
    """

    key_heads: int
    shared: int
    wide: int
    before: int
    dim: int

    def do(self, x: torch.Tensor) -> torch.Tensor:
        """From the order of transformers to that of GGUF, a new tensor."""
        return self._swapped(x, (self.key_heads, self.shared))

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """Back again, a new tensor."""
        return self._swapped(x, (self.shared, self.key_heads))

    def of_elements(self, values: int) -> Tiles | None:
        """The same of a tensor that has one element for so many values; None where heads are no whole elements."""
        if self.wide % values or self.before % values:
            return None
        return replace(self, wide=self.wide // values, before=self.before // values)

    def _swapped(self, x: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
        entries = torch.arange(self.before, x.shape[self.dim], device=x.device)
        order = entries.view(*heads, self.wide).transpose(0, 1).reshape(-1)
        return x.index_select(self.dim, torch.cat([torch.arange(self.before, device=x.device), order]))
