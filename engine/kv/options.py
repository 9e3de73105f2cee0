"""Whether sequences have windows or pages, as the settings say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from lazyio import settings
from lazyio.engine.admission import Windows, check_lanes
from lazyio.engine.kv.layout import Layout
from lazyio.engine.kv.ledger import check_fits, pages_of
from lazyio.engine.kv.paged import Paged, Reuse, check_pages
from lazyio.engine.models.base import Model
from lazyio.engine.weights.trunk import Trunk
from lazyio.errors import SettingError


@dataclass(frozen=True, slots=True)
class KvOptions:
    """The settings kv_pages, prefix_reuse and poison_state."""

    pages: int | None  # None: as many as there is memory for; 0: windows
    reuse: bool
    poison: bool

    @classmethod
    def resolve(cls, kv_pages: int | str | None, prefix_reuse: bool | None, poison_state: bool | None) -> Self:
        """What is given, else what the environment says. Raises SettingError for what would be ignored."""
        pages: int | None = settings.resolve("kv_pages", kv_pages)
        for name, value in (("prefix_reuse", prefix_reuse), ("poison_state", poison_state)):
            if pages == 0 and value is not None and settings.resolve(name, value):
                raise SettingError(f"{name} has no effect while kv_pages is off: leave it out, or set kv_pages")
        return cls(
            pages, settings.resolve("prefix_reuse", prefix_reuse), settings.resolve("poison_state", poison_state)
        )

    def check(self, trunk: Trunk) -> None:
        """Raise what shows before weights are read: NeverFits for too few or many pages, Unsupported as `Layout`."""
        if self.pages != 0:
            layout = Layout(trunk.model, trunk.dtype)
            if self.pages is not None:
                check_pages(self.pages, layout, trunk.device, trunk.weights_bytes)

    def fits_ever(self, trunk: Trunk, tokens: int, streams: int) -> None:
        """Raise NeverFits, before weights are read, for a sequence of so many tokens that would not fit afterwards.

        What a pool that is as large as can be has room for does not show before.
        """
        if self.pages == 0:
            each = trunk.model.new_state(tokens, torch.device("meta"), trunk.dtype).nbytes
            check_lanes(each, tokens, streams, trunk.device, weights_bytes=trunk.weights_bytes)
        elif self.pages is not None:
            check_fits(tokens, pages_of(tokens), Layout(trunk.model, trunk.dtype).run_pages, self.pages)

    def lacking(self, trunk: Trunk, tokens: int, streams: int) -> int:
        """Pages beyond those there are that so many sequences of so many tokens would take at once; 0 if none.

        That is what sequences take that do not begin alike.
        """
        if not self.pages:
            return 0
        each = pages_of(tokens) + Layout(trunk.model, trunk.dtype).run_pages
        return max(0, streams * each - self.pages)

    def admission(self, model: Model, streams: int, *, batch_invariant: bool) -> Windows | Paged:
        """What gives so many lanes their memory. Raises what `Paged` raises.

        Where batches must leave no trace, a sequence is resumed at page edges alone: no cut is anywhere else.
        """
        if self.pages == 0:
            return Windows(model, streams)
        reuse = Reuse(ends=not batch_invariant) if self.reuse else None
        return Paged(model, self.pages, streams=streams, reuse=reuse, poison=self.poison)
