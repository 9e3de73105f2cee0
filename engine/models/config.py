"""Reading a config.json: each key has its type and its default, and what does not fit is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from lazyio.errors import ModelError

T = TypeVar("T")


class Config:
    """Typed access to the keys of a configuration. A key that is absent or null has its default.

    Defaults are those of the configuration classes of transformers, which leaves them out when it saves. Without a
    default, a key must be there. All methods raise ModelError with the name of the key and what it must be.
    """

    def __init__(self, values: Mapping[str, Any], inside: str = "") -> None:
        """`inside` is the key of the configuration that this one is the value of, with a dot behind it."""
        self._values, self._inside = values, inside

    def has(self, key: str) -> bool:
        """Whether the key is there, and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer, `least` or more."""
        value = self._get(key, default)
        if not _is_integer(value) or value < least:
            raise self.error(key, f"it must be an integer, {least} or more")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if not _is_number(value) or value <= 0:
            raise self.error(key, "it must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def name(self, key: str, among: Collection[str], default: str | None = None) -> str:
        """One of these names."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in among:
            raise self.error(key, f"it must be {_listed(among)}")
        return value

    def names(self, key: str, among: Collection[str], count: int, default: list[str] | None = None) -> list[str]:
        """So many of these names, in order."""

        def known(value: Any) -> bool:
            return isinstance(value, str) and value in among

        return self._several(key, default, known, f"{count} of {_listed(among)}", count)

    def integers(self, key: str, default: list[int] | None = None, *, count: int | None = None) -> list[int]:
        """Integers, none negative; with `count`, so many of them."""

        def known(value: Any) -> bool:
            return _is_integer(value) and value >= 0

        many = "integers" if count is None else f"{count} integers"
        return self._several(key, default, known, f"{many}, none negative", count)

    def integer_of_each(self, key: str, count: int) -> list[int]:
        """So many integers, none negative, or a single one that stands for all of them."""
        if isinstance(self._get(key, None), list | tuple):
            return self.integers(key, count=count)
        return [self.integer(key)] * count

    def numbers(self, key: str, default: list[float] | None = None, *, count: int) -> list[float]:
        """So many finite numbers."""
        return [float(x) for x in self._several(key, default, _is_number, f"{count} numbers", count)]

    def part(self, key: str) -> Config:
        """The configuration that is the value of `key`, an empty one where the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "it must be an object with keys of its own")
        return Config(value, f"{self._inside}{key}.")

    def numbered(self, key: str) -> dict[int, Config]:
        """Configurations by number, as in {"05": {...}}: the value of `key`, none where the key is absent."""
        part = self.part(key)
        if not all(number.isdecimal() for number in part._values):
            raise self.error(key, "its keys must be numbers")
        return {int(number): part.part(number) for number in part._values}

    def only(self, *keys: str) -> None:
        """Refuse a configuration that has other keys than these."""
        for key in self._values:
            if key not in keys:
                raise self.error(key, f"no key other than {_listed(keys)} can be followed here")

    def expect(self, **values: Any) -> None:
        """Refuse a configuration that has one of these keys with another value: only that one is followed here."""
        for key, value in values.items():
            if self.has(key) and self._values[key] != value:
                raise self.error(key, f"only {json.dumps(value)} can be run here")

    def error(self, key: str, must: str) -> ModelError:
        """What to raise where the value of `key` is not what it `must` be."""
        if key not in self._values:
            return ModelError(f"the configuration lacks {self._inside}{key}; {must}")
        return ModelError(f"the configuration has {self._inside}{key} = {self._values[key]!r}; {must}")

    def _get(self, key: str, default: Any) -> Any:
        return self._values[key] if self.has(key) else default

    def _several(
        self, key: str, default: list[T] | None, known: Callable[[Any], bool], what: str, count: int | None
    ) -> list[T]:
        value = self._get(key, default)
        if not isinstance(value, list | tuple) or not all(map(known, value)) or count not in (None, len(value)):
            raise self.error(key, f"it must be a list of {what}")
        return list(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _listed(names: Collection[str]) -> str:
    return " or ".join(json.dumps(name) for name in names)
