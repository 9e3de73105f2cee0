"""Text of tokens as they come, never half a character of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Turns tokens into text one at a time: what `add` and at last `end` return, joined, is the text of all of them.

    A character may take several tokens. Its bytes are held back until it is complete, or until what follows shows that
    it never will be. Tokens that are single bytes of a vocabulary of pieces are held back up to the next one that is
    not: such a vocabulary reads a run of them as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, special: Collection[int]) -> None:
        """`special` are the ids that are no text."""
        self._tokenizer = tokenizer
        self._special = special
        # Tokens that have been told, for a decoder that treats the first token of a text in another way.
        self._told: list[int] = []
        self._held: list[int] = []
        self._told_text = ""

    def add(self, token_id: int) -> str:
        """The text that is complete with this token; "" for a special token, and for an id that no token has."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None or token_id in self._special:
            return ""
        self._held.append(token_id)
        if _BYTE_TOKEN.fullmatch(piece):
            return ""
        text = self._decode([*self._told, *self._held])
        return "" if text.endswith(_REPLACEMENT) else self._tell(text)

    def end(self) -> str:
        """The text of what is held back still."""
        return self._tell(self._decode([*self._told, *self._held])) if self._held else ""

    def _tell(self, text: str) -> str:
        new = text[len(self._told_text) :]
        if new:
            self._told, self._held = self._held, []
            self._told_text = self._decode(self._told)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text
