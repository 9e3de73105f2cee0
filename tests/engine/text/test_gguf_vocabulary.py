from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from lazyio.engine.text.gguf_vocabulary import read_vocabulary
from lazyio.errors import ModelError
from lazyio.ple.gguf_header import read_values

from .conftest import SPECIAL, TEXT, WriteGguf

SAMPLES = [
    *TEXT[:3],
    "",
    " ",
    "  leading,  and trailing  ",
    "I'LL they'Re isn't\r\n\r\n\n12345 a1b2",
    "e\u0301 is composed; \U0001f600 \u4f60\u597d \u0939\u093f\u0928\u094d\u0926\u0940 \u200b\x00\x7f",
    "<tool_call> is one token, a<tool_call>b",
    "x\n\n\n\ny\n",
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_bytes_are_cut_and_merged_as_by_the_tokenizer_itself(byte_level: Tokenizer, write_gguf: WriteGguf, sample: str):
    read = read_vocabulary(str(write_gguf(byte_level, "gpt2", "qwen35"))).tokenizer
    ids = byte_level.encode(sample).ids
    assert read.encode(sample).ids == ids
    assert read.decode(ids) == byte_level.decode(ids)


def test_pre_tokenizers_differ_where_they_are_said_to(byte_level: Tokenizer, write_gguf: WriteGguf):
    marks = "\u0939\u093f\u0928\u094d\u0926\u0940"  # letters and marks in turns
    words = {}
    for pre in ("qwen2", "qwen35"):
        read = read_vocabulary(str(write_gguf(byte_level, "gpt2", pre))).tokenizer
        words[pre] = len(read.pre_tokenizer.pre_tokenize_str(marks))
    assert words["qwen35"] == 1 < words["qwen2"]


@pytest.mark.parametrize("sample", SAMPLES)
def test_pieces_with_merges(pieces: Tokenizer, write_gguf: WriteGguf, sample: str):
    path = write_gguf(pieces, "gemma4", None, {"unknown_token_id": 3, "bos_token_id": 2})
    read = read_vocabulary(str(path))
    ids = pieces.encode(sample).ids
    assert read.tokenizer.encode(sample).ids == ids
    assert read.tokenizer.decode(ids) == sample
    assert read.begin == 2


def by_score(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's way: of all neighbours that make a token, merge the first that make the best one."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        joined = ["".join(pair) for pair in pairwise(symbols)]
        best = max(
            (at for at, piece in enumerate(joined) if piece in ids),
            key=lambda at: scores[ids[joined[at]]],
            default=None,
        )
        if best is None:
            break
        symbols[best : best + 2] = [joined[best]]
    unknown = [[ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [number for part in unknown for number in part]


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if "\n" not in sample or sample in TEXT])
def test_pieces_with_scores(pieces: Tokenizer, write_gguf: WriteGguf, sample: str):
    tokens = [pieces.id_to_token(number) for number in range(pieces.get_vocab_size())]
    # In no order, and no two alike.
    scores = [float(-(number * 7919 % len(tokens))) for number in range(len(tokens))]
    changed: dict[str, Any] = {"merges": None, "scores": scores, "unknown_token_id": 3, "add_space_prefix": False}
    read = read_vocabulary(str(write_gguf(pieces, "llama", "default", changed))).tokenizer
    ids = read.encode(sample).ids
    assert ids == by_score(sample, {token: number for number, token in enumerate(tokens)}, scores)
    assert read.decode(ids) == sample


def test_a_space_before_the_text(pieces: Tokenizer, write_gguf: WriteGguf):
    scores = [float(-number) for number in range(pieces.get_vocab_size())]
    changed = {"merges": None, "scores": scores, "unknown_token_id": 3}
    read = read_vocabulary(str(write_gguf(pieces, "llama", None, changed))).tokenizer
    assert read.encode("the line").ids == pieces.encode(" the line").ids
    assert read.decode(read.encode("the line").ids) == "the line"


def test_a_merge_of_spaces(pieces: Tokenizer, write_gguf: WriteGguf):
    # The first token of a pair may itself be a space.
    path = write_gguf(pieces, "gpt2", "qwen2", {"tokens": [" ", "a", " a"], "token_type": None, "merges": ["  a"]})
    assert read_vocabulary(str(path)).tokenizer.encode("x").ids == []
    assert read_values(str(path), {"tokenizer.ggml.merges"}) == {"tokenizer.ggml.merges": ["  a"]}


def test_what_else_the_keys_say(byte_level: Tokenizer, write_gguf: WriteGguf):
    end, start, turn = (byte_level.token_to_id(token) for token in SPECIAL)
    changed = {
        "tokenizer.chat_template": "{{ messages }}" + " " * 5000,
        "eos_token_id": turn,
        "padding_token_id": end,
        "bos_token_id": start,
        "add_bos_token": True,
    }
    read = read_vocabulary(str(write_gguf(byte_level, "gpt2", "qwen35", changed)))
    assert read.template == changed["tokenizer.chat_template"]
    assert read.stop_ids == {turn, end}  # the latter by its text
    assert read.special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert read.begin == start
    assert (
        read_vocabulary(str(write_gguf(byte_level, "gpt2", "qwen35", {**changed, "add_bos_token": None}))).begin is None
    )
    added = read.tokenizer.get_added_tokens_decoder()
    assert {token.content: token.special for token in added.values()} == {
        **dict.fromkeys(SPECIAL, True),
        "<tool_call>": False,
    }
    assert {number: token.content for number, token in added.items()} == {
        byte_level.token_to_id(token): token for token in (*SPECIAL, "<tool_call>")
    }


def test_tokens_that_only_fill_up_are_none(byte_level: Tokenizer, write_gguf: WriteGguf):
    count = byte_level.get_vocab_size()
    tokens = [byte_level.id_to_token(number) for number in range(count)] + ["[PAD1]", "[PAD2]"]
    path = write_gguf(byte_level, "gpt2", "qwen35", {"tokens": tokens, "token_type": [1] * count + [5, 5]})
    read = read_vocabulary(str(path)).tokenizer
    assert max(read.get_vocab().values()) == count - 1


@pytest.mark.parametrize(
    ("model", "pre", "changed", "message"),
    [
        ("gpt2", "llama-bpe", {}, r"model 'gpt2' with the pre-tokenizer 'llama-bpe'; known here are gemma4, llama"),
        ("t5", None, {}, "model 't5' with the pre-tokenizer None"),
        (
            "gpt2",
            "qwen35",
            {"tokens": None},
            r"no vocabulary \(no key tokenizer.ggml.tokens\); give prompts as token ids",
        ),
        ("gpt2", "qwen35", {"tokens": [1, 2]}, "tokens must be an array of strings"),
        ("gpt2", "qwen35", {"token_type": [1, 1]}, "tokens, and types of 2"),
        ("gpt2", "qwen35", {"merges": None}, "merges must be an array of strings"),
        ("gpt2", "qwen35", {"merges": ["q zz"]}, "Token `zz` out of vocabulary"),
        ("gpt2", "qwen35", {"eos_token_id": 9999}, "eos_token_id is 9999, and there are 404 tokens"),
        ("llama", None, {"merges": None}, "need as many scores, or merges"),
    ],
)
def test_refusals(
    byte_level: Tokenizer, write_gguf: WriteGguf, model: str, pre: str | None, changed: dict[str, Any], message: str
):
    path = write_gguf(byte_level, model, pre, changed)
    with pytest.raises(ModelError, match=message) as refused:
        read_vocabulary(str(path))
    assert str(path) in str(refused.value)
