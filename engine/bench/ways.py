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
    """One arm."""

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
    depths, names = values_of("--lookahead", lookaheads, "lookahead"), values_of("--modes", modes, "lazy_mode")
    return [
        Way(RESIDENT, max(depths)),
        *(Way(mode, depth) for mode in names if mode != RESIDENT for depth in depths),
    ]


def values_of(name: str, text: str, setting: str, *, some: bool = True) -> list[Any]:
    """What words separated by commas mean to a setting, each once; `some`: there are some, and none is empty.

    Raises SettingError, which names the option, for other text.
    """
    words = [word.strip() for word in text.split(",") if some or word.strip()]
    values = [settings.SETTINGS[setting].read(word, f"a word of {name}") for word in words] if all(words) else []
    if len(set(values)) < len(words):
        raise SettingError(f"{name} is {text!r}; it can be words separated by commas, each once")
    return values
