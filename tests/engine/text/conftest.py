"""Tokenizers of both families, trained on a few lines, and checkpoints of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# The cut of the qwen3_5 family as its tokenizer.json has it.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = [
    "It's the first line of a text, and it isn't the last one.\n\nThe second line has numbers: 12, 345 and 6789.\n",
    "She sells sea shells; the shells that she sells are sea shells, they'll say.  Two spaces,   three spaces.\n",
    "naïve café, résumé, Ünïcode, 日本語のテキスト, 中文文本, हिन्दी भाषा, and the line is at its end\t(a tab).\n",
] * 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A tokenizer as those of qwen3_5 are, of some 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def pieces() -> Tokenizer:
    """A tokenizer as those of Gemma are: characters and what they merge to, and bytes for other characters."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, "<turn|>"],
        limit_alphabet=60,
        max_token_length=6,
        show_progress=False,
    )
    trained.train_from_iterator(TEXT, trainer)
    state = json.loads(trained.to_str())
    state["added_tokens"] = [entry for entry in state["added_tokens"] if not entry["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Writes the vocabulary of a tokenizer, as conversion scripts do, with keys `changed` or, where None, left out."""

    def write(tokenizer: Tokenizer, model: str, pre: str | None, changed: Mapping[str, Any] | None = None) -> Path:
        state = json.loads(tokenizer.to_str())
        added = tokenizer.get_added_tokens_decoder()
        tokens = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
        kinds = [
            (3 if added[number].special else 4) if number in added else 6 if token.startswith("<0x") else 1
            for number, token in enumerate(tokens)
        ]
        values: dict[str, Any] = {
            "model": model,
            "pre": pre,
            "tokens": tokens,
            "token_type": kinds,
            "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        }
        values |= changed or {}
        path = tmp_path / "model.gguf"
        path.unlink(missing_ok=True)
        writer = gguf.GGUFWriter(path, "qwen35")
        for key, value in values.items():
            name = key if "." in key else f"tokenizer.ggml.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif value is not None:
                writer.add_string(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return path

    return write
