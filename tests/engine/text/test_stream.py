from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lazyio.engine.text.stream import TextStream

from .conftest import TEXT


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    added = tokenizer.get_added_tokens_decoder()
    stream = TextStream(tokenizer, {number for number, token in added.items() if token.special})
    return [*(stream.add(number) for number in ids), stream.end()]


@pytest.fixture(params=["byte_level", "pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def test_text_comes_as_it_is_and_never_half_a_character(tokenizer: Tokenizer):
    for text in (*TEXT[:3], "a\U0001f600b 日本 ﷽ é", "\U0001f600"):
        pieces = streamed(tokenizer, tokenizer.encode(text).ids)
        assert "".join(pieces) == text == tokenizer.decode(tokenizer.encode(text).ids)
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_text_is_not_held_back_longer_than_needed(tokenizer: Tokenizer):
    ids = tokenizer.encode("the line is the last line").ids
    pieces = streamed(tokenizer, ids)
    assert all(pieces[:-1])
    assert pieces[-1] == ""


def test_characters_of_several_tokens_come_whole(byte_level: Tokenizer):
    ids = byte_level.encode("\U0001f600!").ids
    assert streamed(byte_level, ids) == ["", "", "", "\U0001f600", "!", ""]


def test_a_character_that_is_never_complete_comes_at_the_end(byte_level: Tokenizer):
    ids = byte_level.encode("a\U0001f600").ids[:-1]
    assert streamed(byte_level, ids) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert streamed(byte_level, []) == [""]


def test_special_and_unknown_ids_are_no_text(byte_level: Tokenizer):
    special = byte_level.token_to_id("<|im_end|>")
    one, other = byte_level.encode("1!").ids
    assert streamed(byte_level, [one, special, 10**9, other]) == ["1", "", "", "!", ""]


def test_a_special_token_does_not_part_the_bytes_of_a_run(pieces: Tokenizer):
    letter, end, byte = (pieces.token_to_id(token) for token in ("<0x41>", "<eos>", "<0xFF>"))
    assert streamed(pieces, [letter, end, letter]) == ["", "", "", "AA"]
    assert "".join(streamed(pieces, [letter, end, byte])) == pieces.decode([letter, byte]) == "\ufffd" * 2


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_text_of_all_of_them(byte_level: Tokenizer, pieces: Tokenizer, data: st.DataObject):
    for tokenizer in (byte_level, pieces):
        ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
