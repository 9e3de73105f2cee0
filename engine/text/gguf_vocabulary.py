"""The vocabulary in a GGUF file, as a tokenizer.

GGUF has the parts of a vocabulary: tokens, their types, and merges or scores. How text is cut before merging is not in
the file: it follows from a name, which stands for rules of ggml's `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lazyio.engine.text.vocabulary import Vocabulary
from lazyio.errors import ModelError
from lazyio.ple.gguf_header import LongValue, read_values

_PREFIX = "tokenizer.ggml."
_KEYS = frozenset(
    _PREFIX + key
    for key in (
        *("model", "pre", "tokens", "token_type", "merges", "scores", "add_space_prefix", "add_bos_token"),
        *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id"),
    )
)
_TEMPLATE = "tokenizer.chat_template"

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

#: How text is cut in words, by tokenizer.ggml.pre.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}| ?[^\s{others}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "qwen2": _WORDS.format(letters=r"\p{L}", others=r"\p{L}"),
    "qwen35": _WORDS.format(letters=r"[\p{L}\p{M}]", others=r"\p{L}\p{M}"),
}
_GEMMA4_CUT = r"[^\n]+|\n+"
_SPACE = "▁"

# Files name one or two of the tokens that end a reply; these end one in whichever model has them.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<turn|>")


def read_vocabulary(path: str) -> Vocabulary:
    """Read the vocabulary of the GGUF file that has the model's metadata.

    Raises ModelError where there is none, where it is of a kind that is not known here, or where its parts contradict
    each other; TableError for a damaged file.
    """
    values = read_values(path, {*_KEYS, _TEMPLATE})
    parts = _Parts(path, {key.removeprefix(_PREFIX): value for key, value in values.items()})
    tokenizer = _tokenizer(parts)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in parts.of_type(_USER_DEFINED)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in parts.of_type(_CONTROL)])
    template = values.get(_TEMPLATE)
    return Vocabulary(
        path,
        tokenizer,
        template=template if isinstance(template, str) else None,
        stop_ids=_stop_ids(parts),
        special=_special(parts),
        begin=_begin(parts),
    )


class _Parts:
    """Values of the file, checked as they are asked for."""

    def __init__(self, path: str, values: Mapping[str, LongValue]) -> None:
        self.path = path
        self.values = values
        if "tokens" not in values:
            raise ModelError(f"{path} has no vocabulary (no key {_PREFIX}tokens); give prompts as token ids")
        self.tokens = self.strings("tokens")
        types: Any = values.get("token_type")
        self._types: list[int] = [1] * len(self.tokens) if types is None else list(types)
        if len(self._types) != len(self.tokens):
            raise self.broken(f"{len(self.tokens)} tokens, and types of {len(self._types)}")

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.broken(f"{_PREFIX}{key} must be an array of strings")
        return value

    def used(self) -> dict[str, int]:
        """Ids by token, without those that only fill up the numbers."""
        return {token: number for number, token in enumerate(self.tokens) if self._types[number] != _UNUSED}

    def of_type(self, kind: int) -> list[str]:
        return [token for token, own in zip(self.tokens, self._types, strict=True) if own == kind]

    def id_of(self, key: str) -> int | None:
        """The token id that is the value of `key`."""
        number = self.values.get(key)
        if not isinstance(number, int):
            return None
        if not 0 <= number < len(self.tokens):
            raise self.broken(f"{_PREFIX}{key} is {number}, and there are {len(self.tokens)} tokens")
        return number

    def token_of(self, key: str) -> str | None:
        """The token whose id that is."""
        number = self.id_of(key)
        return None if number is None else self.tokens[number]

    def broken(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: its vocabulary is damaged: {what}; give prompts as token ids")


def _tokenizer(parts: _Parts) -> Tokenizer:
    model, pre = parts.values.get("model"), parts.values.get("pre")
    if model in ("gemma4", "llama"):
        return _of_pieces(parts, cut=_GEMMA4_CUT if model == "gemma4" else None)
    if model == "gpt2" and pre in CUTS:
        return _of_bytes(parts, CUTS[str(pre)])
    known = f"gemma4, llama, and gpt2 with one of {', '.join(CUTS)}"
    raise ModelError(
        f"{parts.path} has a tokenizer of the model {model!r} with the pre-tokenizer {pre!r}; known here are {known}: "
        "give prompts as token ids"
    )


def _of_bytes(parts: _Parts, cut: str) -> Tokenizer:
    """Byte-level BPE: tokens are bytes, each written as a printable character."""
    tokenizer = Tokenizer(_bpe(parts, _merges(parts)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(parts: _Parts, cut: str | None) -> Tokenizer:
    """BPE over characters as SentencePiece does it, with tokens for the bytes of characters that have none."""
    merges = _merges(parts) if "merges" in parts.values else _merges_by_score(parts)
    unknown = parts.token_of("unknown_token_id")
    tokenizer = Tokenizer(_bpe(parts, merges, unk_token=unknown, fuse_unk=unknown is not None, byte_fallback=True))
    prefixed = bool(parts.values.get("add_space_prefix", parts.values.get("model") == "llama"))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    if cut is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(cut), "isolated")
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _bpe(parts: _Parts, merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=parts.used(), merges=list(merges), **options)
    except Exception as error:  # what the library raises for a merge of tokens that are none has no class of its own
        raise parts.broken(str(error)) from error


def _merges(parts: _Parts) -> list[tuple[str, str]]:
    """Pairs to merge, in order of preference. A space that belongs to a token may only come first in a pair."""
    cuts = [(merge, merge.find(" ", 1)) for merge in parts.strings("merges")]
    return [(merge[:at], merge[at + 1 :]) for merge, at in cuts]


def _merges_by_score(parts: _Parts) -> list[tuple[str, str]]:
    """The same, where tokens have scores: a pair is preferred to another if the token that it makes scores higher."""
    scores: Any = parts.values.get("scores")
    if scores is None or len(scores) != len(parts.tokens):
        raise parts.broken(f"{len(parts.tokens)} tokens need as many scores, or merges")
    ids = parts.used()
    pairs: list[tuple[float, int, int, str, str]] = []
    for token, number in ids.items():
        score = -float(scores[number])
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                pairs.append((score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(pairs)]


def _begin(parts: _Parts) -> int | None:
    """The token that every text begins with."""
    # In ggml vocabularies of pieces begin texts with BOS unless they say otherwise, those of bytes if they say so.
    wanted = parts.values.get("add_bos_token", parts.values.get("model") != "gpt2")
    return parts.id_of("bos_token_id") if wanted else None


def _stop_ids(parts: _Parts) -> frozenset[int]:
    named = (parts.id_of(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    known = set(parts.of_type(_CONTROL)).intersection(_ENDS)
    by_text = (number for number, token in enumerate(parts.tokens) if token in known)
    return frozenset({*(number for number in named if number is not None), *by_text})


def _special(parts: _Parts) -> dict[str, str]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    found = {name: parts.token_of(key) for name, key in keys.items()}
    return {name: token for name, token in found.items() if token is not None}
