"""Chat templates: messages in, the text that a model was trained to see for them out.

A template comes with a checkpoint, so it is a stranger's program: it runs in the sandbox of jinja2, which lets it reach
nothing but what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lazyio.errors import ModelError, PromptError

Messages = Sequence[Mapping[str, Any]]


class _Refusal(Exception):
    """What a template says of messages that it can't render."""


class ChatTemplate:
    """A template, and the special tokens by the names that it knows them by ("bos_token", "eos_token")."""

    def __init__(self, path: str, source: str, special: Mapping[str, str]) -> None:
        self._path = path
        self._special = dict(special)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelError(
                f"{path}: its chat template can't be understood: {error}; give the prompt as plain text or token ids"
            ) from error

    def render(self, messages: Messages) -> str:
        """The text of a chat up to where the model is to answer. Raises PromptError where the template refuses it."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special
            )
        except _Refusal as refusal:
            raise PromptError(f"the chat template refuses these messages: {refusal}") from refusal
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise PromptError(
                f"{self._path}: its chat template fails on these messages: {error}; a message is "
                '{"role": ..., "content": ...}'
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Spaces, tags and helpers as transformers' `apply_chat_template` gives them, for which templates are written."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is, where jinja2's own filter replaces the characters that HTML would need escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
