"""A reply as it is written: token after token, its text, and where it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyio.engine.stopping import StopStrings

if TYPE_CHECKING:
    from lazyio.engine.text.text import Text


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be generated: all of it checked, nothing of it begun."""

    tokens: Sequence[int]  # of the prompt
    cuts: Sequence[int]  # of the prompt into ubatches, where nothing else is computed
    max_tokens: int
    stop_ids: Collection[int]
    stop_strings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next token of a reply, and the text that became certain with it, which may be none or that of several."""

    token: int
    text: str


class Writing:
    """Turns the tokens of a reply into pieces. `reason` is why it ended, None as long as it has not."""

    def __init__(self, plan: Plan, text: Text | None) -> None:
        self._plan = plan
        self._stream = None if text is None else text.stream()
        self._stop = StopStrings(plan.stop_strings)
        self._text: list[str] = []
        self._ends: str | None = None
        self.tokens: list[int] = []
        self.reason: str | None = None

    @property
    def text(self) -> str:
        """What is certain of it."""
        return "".join(self._text)

    def add(self, token: int) -> bool:
        """Take the next token; whether another may follow, as far as that is known without its text."""
        self.tokens.append(token)
        if token in self._plan.stop_ids:
            self._ends = "stop"
        elif len(self.tokens) == self._plan.max_tokens:
            self._ends = "length"
        return self._ends is None

    def piece(self) -> Piece:
        """The last token with its text, all that is left of it where it is the last; once after each `add`."""
        stopped = self._ends == "stop"
        text = "" if stopped or self._stream is None else self._stop.add(self._stream.add(self.tokens[-1]))
        if self._ends is not None and not self._stop.found:
            text += self._rest()
        self.reason = "stop" if self._stop.found else self._ends
        self._text.append(text)
        return Piece(self.tokens[-1], text)

    def _rest(self) -> str:
        if self._stream is None:
            return ""
        text = self._stop.add(self._stream.end())
        return text if self._stop.found else text + self._stop.end()
