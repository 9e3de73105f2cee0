"""Text to token ids and back, as the checkpoint of a model has it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from lazyio.engine.text import folder_vocabulary, gguf_vocabulary
from lazyio.engine.text.stream import TextStream
from lazyio.engine.text.template import ChatTemplate, Messages
from lazyio.engine.text.vocabulary import Vocabulary
from lazyio.errors import ModelError, PromptError
from lazyio.ple.gguf import is_gguf, open_gguf


def open_text(path: str | os.PathLike[str]) -> Text:
    """The text of a checkpoint: a folder, a file in one, or a GGUF file, any part of a split one.

    Raises ModelError where there is no tokenizer, or one that is damaged or of a kind that is not known here.
    """
    place = Path(path)
    if not place.exists():
        raise ModelError(f"there is no {place}")
    if place.is_dir():
        return Text(folder_vocabulary.read_vocabulary(place))
    if is_gguf(str(place)):
        return Text(gguf_vocabulary.read_vocabulary(open_gguf(str(place)).first_path))
    return Text(folder_vocabulary.read_vocabulary(place.parent))


class Text:
    """A tokenizer, the template of a chat, and the tokens that end a reply."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.path = vocabulary.path
        self.stop_ids = vocabulary.stop_ids
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        added = vocabulary.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added.items() if token.special)
        self._lock = Lock()  # how the tokenizer takes special tokens is a state of it

    @property
    def vocab(self) -> int:
        """One more than the highest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_template(self) -> bool:
        """Whether there is a template for chats."""
        return self._vocabulary.template is not None

    def check(self, vocab: int) -> None:
        """Raise ModelError if a token id is beyond the vocabulary of a model, which may well have more of them."""
        if self.vocab > vocab:
            raise ModelError(
                f"{self.path}: the tokenizer has ids up to {self.vocab - 1}, and the model a vocabulary of {vocab}: "
                "they do not belong together; bring the model's own, or give prompts as token ids"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: what looks like a special token in it is text. BOS first, if the tokenizer says so.

        Raises PromptError for text that can't be encoded.
        """
        ids, begin = self._encoded(text, plain=True), self._vocabulary.begin
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]

    def chat(self, messages: Messages) -> list[int]:
        """Token ids of a chat, {"role": ..., "content": ...} each, up to where the model is to answer.

        Raises ModelError where there is no template or one that is damaged, PromptError where it refuses the messages.
        """
        vocabulary = self._vocabulary
        if vocabulary.template is None:
            raise ModelError(f"{self.path} has no chat template; give the prompt as plain text or token ids")
        template = ChatTemplate(self.path, vocabulary.template, vocabulary.special)
        return self._encoded(template.render(messages), plain=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens, and ids that no token has, are left out."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def stream(self) -> TextStream:
        """Text of tokens as they come."""
        return TextStream(self._tokenizer, self._special_ids)

    def _encoded(self, text: str, *, plain: bool) -> list[int]:
        """Ids of plain text, with the special tokens that stand around it, or of text that has its special tokens."""
        try:
            text.encode()  # tells what is wrong with half a character, as the tokenizer does not
            with self._lock:
                self._tokenizer.encode_special_tokens = plain
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=plain).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError(f"the prompt is no text that can be encoded: {error}") from error
        return ids
