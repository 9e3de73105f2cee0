from __future__ import annotations

import re

import pytest

from lazyio.engine.text.template import ChatTemplate
from lazyio.errors import ModelError, PromptError

CHAT = """\
{{ bos_token }}{% for message in messages %}
    {%- if message.role not in ("user", "assistant") %}
        {{- raise_exception("no role " + message.role) }}
    {%- endif %}
    {%- if message.content == "skip" %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def rendered(source: str, *contents: str) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatTemplate("folder", source, {"bos_token": "<s>"}).render(messages)


def test_a_chat_ends_where_the_model_is_to_answer():
    wanted = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nthere<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(CHAT, " hi ", "skip", "there") == wanted


def test_helpers_that_templates_count_on():
    assert rendered("{{ messages[0].content | tojson }}", '<é & "x">') == '"<é & \\"x\\">"'
    assert rendered("{{ messages | tojson(indent=1) }}", "a") == '[\n {\n  "role": "user",\n  "content": "a"\n }\n]'
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rendered("{{ strftime_now('%Y-%m-%d') }}"))
    assert rendered("{% if tools %}a{% endif %}{% if tools is none %}b{% endif %}") == "b"


def test_a_refusal_of_the_template_is_one_of_the_prompt():
    template = ChatTemplate("folder", CHAT, {"bos_token": ""})
    with pytest.raises(PromptError, match="refuses these messages: no role system"):
        template.render([{"role": "system", "content": "x"}])
    with pytest.raises(PromptError, match=r"folder: its chat template fails .* has no attribute 'x'"):
        rendered("{{ messages[0].content.x.y }}", "hi")


def test_a_template_reaches_nothing_of_the_program():
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(PromptError, match="fails on these messages"):
            rendered(attack)


def test_a_broken_template_is_named():
    with pytest.raises(ModelError, match=r"folder: its chat template can't be understood: Expected an expression"):
        ChatTemplate("folder", "{% if %}", {})
