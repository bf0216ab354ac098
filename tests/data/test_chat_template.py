"""Chat templates, held against transformers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from harness.contexts import tokenizer_at
from titan_core.api import UserError
from titan_data.tokenizers.chat_template import ChatTemplate
from titan_data.tokenizers.hugging_face import build

TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and message['role'] == 'system' %}
        {{- '<sys>' + message['content'] | trim + eos_token }}
        {%- continue %}
    {%- endif %}
    {%- if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}
    {{- '<' + message['role'] + '>' + message['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
MESSAGES = [{"role": "system", "content": " be kind "}, {"role": "user", "content": "hé\n{{ x }}"}]
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


def folder_with(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return tmp_path


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_a_template_renders_as_in_transformers(tmp_path: Path, place: str) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), bos_token="<s>", eos_token="</s>"
    )
    expected = tokenizer.apply_chat_template(MESSAGES, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    if place == "file":
        folder = folder_with(tmp_path)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        named = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        folder = folder_with(tmp_path, chat_template=TEMPLATE if place == "config" else named)
    assert ChatTemplate.read(folder, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES).text == expected


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    # template, arguments
    "JSON": ("{{ tools | tojson }} {{ tools | tojson(indent=2) }}", {"tools": [{"b": "é<", "a": None}]}),
    "sorted JSON": (
        "{{ tools | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}", {"tools": [{"b": "é", "a": 1}]},
    ),
    "blocks": ("  {% if true %}\nx\n  {% endif %}\n y", {}),
    "loops": ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", {}),
    "documents": ("{{ documents is defined }} {{ documents is none }} {{ tools is none }} {{ nothing is defined }}", {}),
    "undefined": ("<{{ nothing }}>{{ messages[0].nothing }}", {}),
    "none": ("{{ none }} {{ true }} {{ 1.50 }} {{ [1, 'a'] }} {{ {'a': none} }}", {}),
    "namespace": ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}", {}),
    "dict": ("{{ dict(a=1) }} {{ dict.fromkeys(['a', 'b'], 0) }}", {}),
    "cycler": ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ range(3) | list }}", {}),
    "joiner": ("{% set j = joiner() %}{{ j() }}{{ j() }}", {}),
    "special tokens": ("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ image_token }}", {}),
    "generation": ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", {}),
    "reasoning": ("{% for m in messages %}{{ m.reasoning_content }} {{ m.thinking }};{% endfor %}", {}),
    "null": ("{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}", {}),
    "tools": ("default", {"tools": [{"name": "f"}]}),
    "no tools": ("default", {}),
    "macro": ("{% macro say(m) %}{% generation %}{{ m }}{% endgeneration %}{% endmacro %}{{ say(messages[0].role) }}", {}),
    "escapes": ("{{ '<' | escape }}{{ '<b>' | striptags }}{{ 'a\\nb' }}", {}),
}  # fmt: skip
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hé", "tool_calls": None, "reasoning": "why"},
    {"role": "assistant", "content": "a", "thinking": "so"},
]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_template_has_the_language_of_transformers(tmp_path: Path, feature: str) -> None:
    template, arguments = FEATURES[feature]
    Tokenizer(WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(template if template != "default" else "for tools")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    if feature in ("reasoning", "null") and not hasattr(chat_template_utils, "_alias_reasoning_fields"):
        pytest.skip("older versions give messages to a template as they are")
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, **arguments)
    assert build(tokenizer_at(tmp_path)).render_chat(CHAT, False, **arguments).text == expected


def test_the_date_is_that_of_the_clock_or_the_given_one() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, "chat_template.jinja")
    assert template.render(MESSAGES, date=datetime.date(2024, 2, 29)).text == "29 Feb 2024"
    before = datetime.date.today()
    found = template.render(MESSAGES).text
    assert found in {day.strftime("%d %b %Y") for day in (before, datetime.date.today())}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for %}", "is not a Jinja template"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages"),
        ("{{ undefined_function() }}", "refuses the messages"),
    ],
)
def test_mistakes(tmp_path: Path, template: str | None, message: str) -> None:
    folder = folder_with(tmp_path, **({} if template is None else {"chat_template": template}))
    with pytest.raises(UserError, match=message):
        ChatTemplate.read(folder, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES)
