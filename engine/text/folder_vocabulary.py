"""The vocabulary in the files of a folder, in the form of transformers' checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lazyio.engine.text.vocabulary import Vocabulary
from lazyio.errors import ModelError

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read tokenizer.json, and of tokenizer_config.json, chat_template.jinja and the configurations what is there.

    Raises ModelError where there is no tokenizer.json, or a file that is damaged.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(
            f"{folder} has no tokenizer.json, the one form of tokenizer that is read; bring it there, or give prompts "
            "as token ids"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # what the library raises has no class of its own
        raise ModelError(f"{file} can't be used: {error}; copy or download it again") from error
    config = _json(folder / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name))) is not None}
    ids = {name: tokenizer.token_to_id(text) for name, text in special.items()}
    end = ids.get("eos_token")
    return Vocabulary(
        str(folder),
        tokenizer,
        template=_template(folder, config),
        stop_ids=_stop_ids(folder) | (frozenset() if end is None else {end}),
        special=special,
        begin=ids.get("bos_token") if config.get("add_bos_token") else None,
    )


def _stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end a reply, of generation_config.json; of config.json where that names none."""
    config = _json(folder / "config.json")
    text = config.get("text_config")
    for place in (_json(folder / "generation_config.json"), config, text if isinstance(text, dict) else {}):
        named = place.get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        if found := frozenset(number for number in ids if isinstance(number, int)):
            return found
    return frozenset()


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template of a chat, from its own file or the tokenizer's configuration, the default one of several."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _text(file)
    named = config.get("chat_template")
    if isinstance(named, list):
        named = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}.get("default")
    return named if isinstance(named, str) else None


def _token_text(value: Any) -> str | None:
    """A special token is its text, or an object with its text."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _json(file: Path) -> dict[str, Any]:
    """What a file of the folder says; nothing where there is no such file."""
    if not file.exists():
        return {}
    try:
        content = json.loads(_text(file))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON: {error}; copy or download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold an object, and holds {type(content).__name__}; copy or download it again")
    return content


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"can't read {file}: {error}") from error
