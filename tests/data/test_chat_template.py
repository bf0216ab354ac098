"""Chat templates, held against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from titan_core.api import UserError
from titan_data.tokenizers.chat_template import ChatTemplate

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
    assert ChatTemplate.read(folder).render(MESSAGES).text == expected


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
        ChatTemplate.read(folder).render(MESSAGES)
