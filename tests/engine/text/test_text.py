from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lazyio.engine.text.text import open_text
from lazyio.errors import ModelError, PromptError, TableError

from .conftest import SPECIAL, TEXT, WriteGguf

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path, byte_level: Tokenizer) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    byte_level.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE})
    )
    return place


def ids_of(tokenizer: Tokenizer, *tokens: str) -> set[int]:
    return {tokenizer.token_to_id(token) for token in tokens}


def test_a_folder(folder: Path, byte_level: Tokenizer):
    text = open_text(folder)
    assert text.encode(TEXT[0]) == byte_level.encode(TEXT[0]).ids
    assert text.decode(text.encode(TEXT[2])) == TEXT[2]
    assert text.vocab == byte_level.get_vocab_size()
    assert text.stop_ids == ids_of(byte_level, "<|im_end|>")
    assert open_text(folder / "tokenizer.json").vocab == text.vocab  # any file in it stands for it


def test_what_looks_special_in_plain_text_is_text(folder: Path, byte_level: Tokenizer):
    text = open_text(folder)
    ids = text.encode("a<|im_end|>b")
    assert not ids_of(byte_level, *SPECIAL) & set(ids)
    assert text.decode(ids) == "a<|im_end|>b"
    assert byte_level.token_to_id("<tool_call>") in text.encode("<tool_call>")


def test_a_chat_has_its_special_tokens(folder: Path, byte_level: Tokenizer):
    text = open_text(folder)
    assert text.has_template
    ids = text.chat([{"role": "user", "content": "the line"}])
    start, end = (byte_level.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert [ids.count(start), ids.count(end), ids[0]] == [2, 1, start]
    assert byte_level.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nthe line<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.decode(ids) == "user\nthe line\nassistant\n"
    assert text.encode("<|im_start|>")[0] != start  # as before


def test_a_template_in_its_own_file_or_one_of_several(folder: Path):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": "a"}]})
    )
    assert open_text(folder).chat([]) == open_text(folder).encode("a")
    (folder / "chat_template.jinja").write_text("b")
    assert open_text(folder).chat([]) == open_text(folder).encode("b")


def test_no_template(folder: Path):
    (folder / "tokenizer_config.json").unlink()
    text = open_text(folder)
    assert not text.has_template
    with pytest.raises(ModelError, match="has no chat template; give the prompt as plain text or token ids"):
        text.chat([{"role": "user", "content": "hi"}])


def test_where_replies_end(folder: Path, byte_level: Tokenizer):
    end = ids_of(byte_level, "<|im_end|>")
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert open_text(folder).stop_ids == {7} | end
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 8, "text_config": {"eos_token_id": 7}}))
    assert open_text(folder).stop_ids == {8} | end
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert open_text(folder).stop_ids == {3, 4} | end


def test_bos_where_the_tokenizer_says_so(folder: Path, byte_level: Tokenizer):
    config = {"bos_token": {"content": "<|endoftext|>", "special": True}, "chat_template": "{{ bos_token }}a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    (bos,) = ids_of(byte_level, "<|endoftext|>")
    text = open_text(folder)
    assert text.encode("a") == [bos, *byte_level.encode("a").ids]
    assert text.encode("") == [bos]
    assert text.chat([]) == [bos, *byte_level.encode("a").ids]  # once: the template has it
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert open_text(folder).encode("a") == byte_level.encode("a").ids


def test_bos_that_the_tokenizer_adds_itself_comes_once(folder: Path, byte_level: Tokenizer):
    (bos,) = ids_of(byte_level, "<|endoftext|>")
    state = json.loads(byte_level.to_str())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(state))
    config = {"bos_token": "<|endoftext|>", "add_bos_token": True, "chat_template": "{{ bos_token }}a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = open_text(folder)
    assert text.encode("a") == text.chat([]) == [bos, *byte_level.encode("a", add_special_tokens=False).ids]


def test_a_tokenizer_that_does_not_fit(folder: Path):
    text = open_text(folder)
    text.check(text.vocab)
    text.check(text.vocab + 100)
    with pytest.raises(ModelError, match=r"ids up to 403, and the model a vocabulary of 403"):
        text.check(text.vocab - 1)


def test_a_gguf_file_and_a_split_one(tmp_path: Path, byte_level: Tokenizer, write_gguf: WriteGguf):
    changed = {"tokenizer.chat_template": TEMPLATE, "eos_token_id": byte_level.token_to_id("<|im_end|>")}
    whole = write_gguf(byte_level, "gpt2", "qwen35", changed)
    text = open_text(whole)
    assert text.encode(TEXT[1]) == byte_level.encode(TEXT[1]).ids
    assert text.stop_ids == ids_of(byte_level, "<|im_end|>", "<|endoftext|>")
    assert text.has_template
    split = {"split.count": 2, "split.tensors.count": 0}
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    write_gguf(byte_level, "gpt2", "qwen35", {**changed, **split, "split.no": 0}).rename(parts[0])
    only = dict.fromkeys(("model", "pre", "tokens", "token_type", "merges"))
    write_gguf(byte_level, "gpt2", None, {**only, **split, "split.no": 1}).rename(parts[1])
    for part in parts:
        assert open_text(part).encode(TEXT[1]) == text.encode(TEXT[1])
    parts[0].unlink()
    with pytest.raises(TableError, match="1 of the model's 2 parts missing"):
        open_text(parts[1])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer.json can't be used: .*EOF"),
        ("tokenizer.json", '{"model": {}}', r"tokenizer.json can't be used"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is no JSON"),
        ("generation_config.json", "[]", "generation_config.json must hold an object, and holds list"),
        ("chat_template.jinja", b"\xff", "can't read .*chat_template.jinja: 'utf-8'"),
    ],
)
def test_damaged_files_are_named(folder: Path, file: str, content: str | bytes, message: str):
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=message):
        open_text(folder)


def test_no_tokenizer_at_all(tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no tokenizer.json, .* or give prompts as token ids"):
        open_text(tmp_path)
    with pytest.raises(ModelError, match=r"there is no .*nowhere"):
        open_text(tmp_path / "nowhere")


def test_a_prompt_that_is_no_text(folder: Path):
    with pytest.raises(PromptError, match=r"no text that can be encoded: .*surrogates not allowed"):
        open_text(folder).encode("\ud800")
