"""Prompts: text, token ids or the messages of a conversation, all of which become token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyio.errors import PromptError

if TYPE_CHECKING:
    from lazyio.engine.text.text import Text

#: Text; token ids, also in an array or a tensor; messages {"role": ..., "content": ...}, as chat templates take them.
Prompt = Any


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list of prompts. Raises PromptError for what is neither."""
    prompts = _plain(prompts)
    if isinstance(prompts, str) or not prompts or _is_id(prompts[0]) or isinstance(prompts[0], Mapping):
        return [prompts]  # what is empty is refused with other prompts that can't be served
    return list(prompts)


def token_ids(prompt: Prompt, text: Callable[[], Text], vocab: int) -> list[int]:
    """The token ids of a prompt, each from 0 to vocab - 1; `text` is called where that takes a tokenizer.

    Raises PromptError for a prompt that is empty, of another type or has ids outside the vocabulary, and what `text`
    raises.
    """
    prompt = _plain(prompt)
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if isinstance(prompt, str):
        ids = text().encode(prompt)
    elif isinstance(prompt[0], Mapping):
        ids = text().chat(list(prompt))
    else:
        ids = _integers(prompt)
    if not ids:
        raise PromptError("the prompt has no tokens: give at least one")
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise PromptError(f"the prompt has token {wrong}, and the model's vocabulary is 0 to {vocab - 1}")
    return ids


def check_length(tokens: int, max_tokens: int, context: int) -> None:
    """Raise PromptError if a prompt of `tokens` and a reply of `max_tokens` go beyond the model's context."""
    if tokens > context:
        raise PromptError(f"the prompt has {tokens} tokens, and the model takes {context}: shorten it")
    if tokens + max_tokens > context:
        raise PromptError(
            f"a prompt of {tokens} tokens and a reply of up to {max_tokens} are {tokens + max_tokens}, and the model "
            f"takes {context}: lower max_tokens, or shorten the prompt"
        )


def _plain(prompt: Any) -> str | Sequence[Any]:
    """A prompt without arrays and tensors."""
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(plain, Sequence) or isinstance(plain, bytes):
        raise _no_prompt(plain)
    return plain


def _integers(prompt: Sequence[Any]) -> list[int]:
    wrong = next((each for each in prompt if not _is_id(each)), None)
    if wrong is not None:
        raise _no_prompt(wrong)
    return [int(token) for token in prompt]


def _is_id(token: object) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool)


def _no_prompt(found: object) -> PromptError:
    return PromptError(
        f"a prompt is text, token ids or messages with role and content; this one has {type(found).__name__} {found!r}"
    )
