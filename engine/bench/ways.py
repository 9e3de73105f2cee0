"""The ways of rows to the model that are compared: a lazy mode, and how many ubatches ahead it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lazyio import settings
from lazyio.errors import SettingError

#: What computing takes is measured with the rows in memory.
RESIDENT = "off"


@dataclass(frozen=True, slots=True)
class Way:
    """One arm. `row_cache` is None for the default of the mode."""

    mode: str
    lookahead: int

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.mode} +{self.lookahead}"


def ways_of(modes: str, lookaheads: str) -> list[Way]:
    """All pairs of the two lists, separated by commas; mode off comes first and once, with the greatest lookahead.

    Raises SettingError for unknown words, and where nothing is left to compare.
    """
    depths, names = _values("--lookahead", lookaheads, "lookahead"), _values("--modes", modes, "lazy_mode")
    return [
        Way(RESIDENT, max(depths)),
        *(Way(mode, depth) for mode in names if mode != RESIDENT for depth in depths),
    ]


def _values(name: str, text: str, setting: str) -> list[Any]:
    words = [word.strip() for word in text.split(",")]
    values = [settings.resolve(setting, word) for word in words] if all(words) else []
    if len(set(values)) < len(words):
        raise SettingError(f"{name} is {text!r}; it can be words separated by commas, each once")
    return values
