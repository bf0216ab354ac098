"""Tools in chats: calls are trained on if the template renders them, and refused otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.chat_model import ANSWER, TEMPLATE, save_tokenizer
from harness.chats import ANSWERED, QUESTION, chat_context, trained
from titan_core.api import CorruptRecord
from titan_data.chat.source import ChatReader

CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "7"}
WITH_TOOLS = TEMPLATE.replace(
    ANSWER, "{{ m['content'] }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|eot|>"
).replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson if tools else '' }}")


def test_calls_of_tools_are_trained_on_if_the_template_renders_them(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, WITH_TOOLS)
    record = {"messages": [QUESTION, CALL, RESULT, ANSWERED], "tools": '[{"name": "f"}]'}  # some write a text of JSON
    text = tokenizer.decode(trained(ChatReader(chat_context(tmp_path))(record, "here")))
    assert '"function": {"name": "f"' in text and text.endswith("<|eot|>b<|eot|>")
    assert ChatReader(chat_context(tmp_path))({**record, "tools": ""}, "here").ids.size < 250


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        ({"messages": [QUESTION, CALL, ANSWERED]}, TEMPLATE, "message 2 calls tools, and the chat template does not render"),
        ({"messages": [QUESTION, ANSWERED], "tools": [{"name": "f"}]}, TEMPLATE, "tools, which the chat template does not"),
        (
            {"messages": [QUESTION, CALL, RESULT, ANSWERED]},
            WITH_TOOLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            "message 3 is the answer of a tool, which the chat template does not render",
        ),
    ],
    ids=["calls", "tools", "answers"],
)
def test_tools_that_the_template_leaves_out_are_refused(tmp_path: Path, record: Any, template: str, message: str) -> None:
    save_tokenizer(tmp_path, template)
    with pytest.raises(CorruptRecord, match=message):
        ChatReader(chat_context(tmp_path))(record, "here")


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson }}"))
    found = ChatReader(chat_context(tmp_path))({"messages": [QUESTION, ANSWERED], "tools": [{"name": "f"}]}, "here")
    assert '[{"name": "f"}]' in tokenizer.decode(found.ids)
