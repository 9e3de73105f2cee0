"""What a checkpoint says of text, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and what belongs to it."""

    path: str
    tokenizer: Tokenizer
    template: str | None  # of a chat, for jinja2
    stop_ids: frozenset[int]  # tokens that end a reply
    special: Mapping[str, str]  # tokens that are named: "bos_token", "eos_token", "pad_token", "unk_token"
    begin: int | None  # a token that every text begins with, where the tokenizer itself may add none
