"""The ways of rows to the model that are compared: a lazy mode, and how many ubatches ahead it reads."""

from __future__ import annotations

from dataclasses import dataclass

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
    depths = [settings.resolve("lookahead", each) for each in _words("--lookahead", lookaheads)]
    names = [settings.resolve("lazy_mode", each) for each in _words("--modes", modes)]
    return [
        Way(RESIDENT, max(depths)),
        *(Way(mode, depth) for mode in names if mode != RESIDENT for depth in depths),
    ]


def _words(name: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise SettingError(f"{name} is {text!r}; it can be words separated by commas, each once")
    return words
