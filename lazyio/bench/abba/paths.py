"""Places in a JSON document: 'prompts.0.rounds.*.[way.mode=uring,again=false].run.wall_s'.

Words between dots go down into objects by key and into lists by number, from the end where it is negative. `*` stands
for every element of a list, `[key=value,...]` for those elements in which each key, itself a path, has that value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lazyio.errors import RunFailed, SettingError

_STEP = re.compile(r"\[([^\[\]]*)\]|([^.\[\]]+)")
_CONDITION = re.compile(r"([^=,\[\]]+)=([^=,\[\]]*)")


@dataclass(frozen=True, slots=True)
class Place:
    """A path; as text it is what it was parsed from."""

    text: str
    steps: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises SettingError for what is no path."""
        steps = tuple(match[0] for match in _STEP.finditer(text))
        conditions = [part for step in steps if step[0] == "[" for part in step[1:-1].split(",")]
        if not steps or ".".join(steps) != text or not all(_CONDITION.fullmatch(part) for part in conditions):
            raise SettingError(
                f"{text!r} is no path; write keys, numbers, * or [key=value] with dots between, for example "
                "prompts.0.rounds.*.[way.mode=uring].run.wall_s"
            )
        return cls(text, steps)

    def __str__(self) -> str:
        return self.text

    def values(self, document: Any) -> list[Any]:
        """All values at this place, in order, at least one.

        Raises RunFailed where there is none; the message names what there is as far as the path could be followed.
        """
        found = [document]
        for count, step in enumerate(self.steps):
            reached = [value for each in found for value in _below(each, step)]
            if not reached:
                raise RunFailed(f"there is nothing at {self.text}: {self._above(count)} {_told(found)}")
            found = reached
        return found

    def _above(self, count: int) -> str:
        return f"{'.'.join(self.steps[:count])} is" if count else "the document is"


def _below(value: Any, step: str) -> Iterator[Any]:
    if isinstance(value, dict) and step in value:
        yield value[step]
    elif isinstance(value, list) and step == "*":
        yield from value
    elif isinstance(value, list) and step.startswith("["):
        yield from (element for element in value if _meets(element, step))
    elif isinstance(value, list) and re.fullmatch(r"-?[0-9]+", step) and -len(value) <= int(step) < len(value):
        yield value[int(step)]


def _meets(element: Any, step: str) -> bool:
    for key, wanted in _CONDITION.findall(step):
        found = [element]
        for word in key.split("."):
            found = [value for each in found for value in _below(each, word)]
        if wanted not in [value if isinstance(value, str) else json.dumps(value) for value in found]:
            return False
    return True


def _told(found: list[Any]) -> str:
    first = found[0]
    if isinstance(first, dict):
        return f"an object with {', '.join(list(first)[:12]) or 'no keys'}"
    return f"a list of {len(first)}" if isinstance(first, list) else f"{json.dumps(first)[:80]}"
