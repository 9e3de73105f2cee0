"""Whether sequences have windows or pages, as the settings say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lazyio import settings
from lazyio.engine.admission import Windows
from lazyio.engine.kv.layout import Layout
from lazyio.engine.kv.paged import Paged, Reuse, check_pages
from lazyio.engine.models.base import Model
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

    def check(self, outline: Model) -> None:
        """Raise what shows before weights are read: NeverFits for too few pages, Unsupported as `Layout` does."""
        if self.pages:
            check_pages(self.pages, Layout(outline))

    def admission(self, model: Model, streams: int, *, batch_invariant: bool) -> Windows | Paged:
        """What gives so many lanes their memory. Raises what `Paged` raises.

        Where batches must leave no trace, a sequence is resumed at page edges alone: no cut is anywhere else.
        """
        if self.pages == 0:
            return Windows(model, streams)
        reuse = Reuse(ends=not batch_invariant) if self.reuse else None
        return Paged(model, self.pages, streams=streams, reuse=reuse, poison=self.poison)
