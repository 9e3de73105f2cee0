from typing import Any

import numpy as np
import pytest
import torch

from lazyio.engine.prompt import check_length, each_prompt, token_ids
from lazyio.errors import PromptError


class Letters:
    """One token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text if letter.isalpha()]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [25, *(token for message in messages for token in self.encode(message["content"]))]


def ids_of(prompt: Any) -> list[int]:
    return token_ids(prompt, Letters, vocab=26)  # type: ignore[arg-type]


CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("abc", [0, 1, 2]),
        ([3, 25], [3, 25]),
        ((3, np.int32(4)), [3, 4]),
        (np.array([3, 4], np.uint16), [3, 4]),
        (torch.tensor([3, 4]), [3, 4]),
        (range(3), [0, 1, 2]),
        (CHAT, [25, 0, 1, 2]),
    ],
)
def test_every_form_becomes_ids(prompt: Any, ids: list[int]) -> None:
    found = ids_of(prompt)
    assert found == ids
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (np.empty(0, np.int64), "the prompt is empty"),
        ("...", "the prompt has no tokens"),
        ([0, 26], "the prompt has token 26, and the model's vocabulary is 0 to 25"),
        ([0, -1], "the prompt has token -1"),
        ([2**70], f"the prompt has token {2**70}"),
        ([0, 1.0], "this one has float 1.0"),
        ([0, True], "this one has bool True"),
        ([0, "a"], "this one has str 'a'"),
        (np.array([0.5]), "this one has float 0.5"),
        (np.array(3), "this one has int 3"),
        (b"abc", "this one has bytes b'abc'"),
        (None, "this one has NoneType None"),
        ([[1, 2]], r"this one has list \[1, 2\]"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, match: str) -> None:
    with pytest.raises(PromptError, match=match):
        ids_of(prompt)


@pytest.mark.parametrize(
    ("prompts", "each"),
    [
        ("ab", ["ab"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (CHAT, [CHAT]),
        (["ab", [1, 2], CHAT], ["ab", [1, 2], CHAT]),
        ([], [[]]),
        ("", [""]),
    ],
)
def test_one_prompt_or_many(prompts: Any, each: list[Any]) -> None:
    assert each_prompt(prompts) == each


def test_what_is_neither_one_prompt_nor_many() -> None:
    with pytest.raises(PromptError, match="a prompt is text, token ids or messages"):
        each_prompt(7)


def test_the_context_holds_prompt_and_reply() -> None:
    check_length(10, 6, 16)
    with pytest.raises(PromptError, match=r"of 10 tokens and a reply of up to 7 are 17, and the model takes 16: lower"):
        check_length(10, 7, 16)
    with pytest.raises(PromptError, match="the prompt has 17 tokens, and the model takes 16: shorten it"):
        check_length(17, 0, 16)
