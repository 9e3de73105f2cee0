"""Replies as they are written: their text, and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazyio.engine.writing import Piece, Plan, Writing

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Spelling:
    """A letter a token."""

    def stream(self) -> Any:
        return self

    def add(self, token: int) -> str:
        return LETTERS[token]

    def end(self) -> str:
        return ""


class Held(Spelling):
    """All of the text comes at the end."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, token: int) -> str:
        self.text += LETTERS[token]
        return ""

    def end(self) -> str:
        return self.text


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def written(
    text: str, max_tokens: int = 10, stop: Sequence[str] = (), stop_ids: Sequence[int] = (), spelling: Any = None
) -> tuple[Writing, list[Piece], list[bool]]:
    """What becomes of a reply of these letters: its pieces, and after which tokens another might have followed."""
    writing = Writing(Plan([1, 2, 3], [3], max_tokens, frozenset(stop_ids), stop), spelling or Spelling())
    pieces, may_follow = [], []
    for token in ids(text):
        may_follow.append(writing.add(token))
        pieces.append(writing.piece())
        if writing.reason is not None:
            break
    return writing, pieces, may_follow


def shown(*given: Any, **more: Any) -> tuple[str, str, str | None]:
    writing, pieces, _ = written(*given, **more)
    return "".join(piece.text for piece in pieces), writing.text, writing.reason


def test_a_reply_ends_at_its_length() -> None:
    writing, pieces, may_follow = written("abcdef", max_tokens=4)
    assert (writing.text, writing.reason, writing.tokens) == ("abcd", "length", [0, 1, 2, 3])
    assert pieces[1] == Piece(1, "b")
    assert may_follow == [True, True, True, False]


def test_a_reply_that_goes_on_has_no_reason_to_end() -> None:
    assert shown("abc") == ("abc", "abc", None)


def test_a_stop_id_is_a_token_without_text() -> None:
    writing, _, may_follow = written("abzcd", stop_ids=[25])
    assert (writing.text, writing.reason, writing.tokens) == ("ab", "stop", [0, 1, 25])
    assert may_follow == [True, True, False]


def test_a_stop_string_is_not_shown_nor_what_begins_it() -> None:
    assert shown("abcxyde", stop=["xyz", "xyd"]) == ("abc", "abc", "stop")


def test_what_might_have_begun_a_stop_string_is_shown_at_the_end() -> None:
    assert shown("abxy", max_tokens=4, stop=["xyz"]) == ("abxy", "abxy", "length")
    assert shown("abxyq", stop=["xyz"], stop_ids=ids("q")) == ("abxy", "abxy", "stop")


def test_text_that_comes_only_at_the_end_is_shown_too_and_looked_at_for_stop_strings() -> None:
    assert shown("abc", max_tokens=3, spelling=Held()) == ("abc", "abc", "length")
    assert shown("abc", max_tokens=3, stop=["b"], spelling=Held()) == ("a", "a", "stop")


def test_without_a_tokenizer_there_are_ids() -> None:
    writing = Writing(Plan([1], [1], 2, frozenset(), []), None)
    assert (writing.add(5), writing.piece()) == (True, Piece(5, ""))
    assert (writing.add(6), writing.piece()) == (False, Piece(6, ""))
    assert (writing.text, writing.reason) == ("", "length")
