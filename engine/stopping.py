"""Stop strings: where a reply ends because of what it says."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for strings in text that comes in pieces; what may be the start of one is held back until that is known.

    `found` tells whether the text has come to one of them, which itself is not part of it any more.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that is certain, of what was held back and `text`."""
        text = self._held + text
        places = [place for place in (text.find(string) for string in self._strings) if place >= 0]
        self.found = bool(places)
        certain = min(places) if places else len(text) - self._begun(text)
        self._held = "" if self.found else text[certain:]
        return text[:certain]

    def end(self) -> str:
        """What was held back, now that nothing more comes."""
        text, self._held = self._held, ""
        return text

    def _begun(self, text: str) -> int:
        """Characters at the end of `text` that are the most of a string's beginning."""
        lengths = (n for string in self._strings for n in range(1, len(string)) if text.endswith(string[:n]))
        return max(lengths, default=0)
