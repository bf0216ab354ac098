"""Records of chats: forms that mean the same, fields that a recipe names, and mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.chat_model import save_tokenizer
from harness.chats import ANSWERED, QUESTION, chat_context, trained
from titan_core.api import CorruptRecord, RecordFormat
from titan_core.api.data.dataset import FormatSpec
from titan_core.plugins.registry import Components
from titan_data.chat.config import ChatSection
from titan_data.chat.source import ChatReader, describe_chats, open_chats

FORMS: dict[str, Any] = {
    "messages": {"messages": [QUESTION, ANSWERED]},
    "nulls of a table": {"messages": [{**QUESTION, "name": None}, {**ANSWERED, "weight": None}], "prompt": None},
    "prompt and completion": {"prompt": "a", "completion": "b"},
    "lists": {"prompt": [QUESTION], "completion": [ANSWERED]},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "conversations of messages": {"conversations": [QUESTION, ANSWERED]},
    "conversation": {"conversation": [QUESTION, ANSWERED], "model": "x"},
    "senders as roles": {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
    "parts of text": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                                   {"role": "assistant", "content": [{"type": "text", "text": "b"},
                                                                     {"type": "text", "text": ""}]}]},
    "alpaca": {"instruction": "a", "input": "", "output": "b"},
    "alpaca without input": {"instruction": "a", "output": "b"},
    "dolly": {"instruction": "a", "context": None, "response": "b", "category": "c"},
    "question and answer": {"question": "a", "answer": "b"},
    "query and response": {"query": "a", "response": "b"},
    "prompt and response": {"prompt": "a", "response": "b"},
    "input and output": {"input": "a", "output": "b"},
    "an empty system message": {"system": "", "prompt": "a", "completion": "b"},
    "messages with their prompt": {"prompt": "a", "prompt_id": "x", "messages": [QUESTION, ANSWERED]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_record_mean_the_same(tmp_path: Path, form: str) -> None:
    save_tokenizer(tmp_path)
    read = ChatReader(chat_context(tmp_path))
    found, expected = read(FORMS[form], "here"), read(FORMS["messages"], "here")
    assert found.ids.tolist() == expected.ids.tolist() and found.weights.tolist() == expected.weights.tolist()


def test_an_input_follows_its_instruction_and_a_system_message_comes_first(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    read = ChatReader(chat_context(tmp_path))
    pairs: list[tuple[dict[str, Any], str, str]] = [
        ({"instruction": "Add.", "input": "1, 2", "output": "b", "system": "Be kind."}, "Be kind.", "Add.\n\n1, 2"),
        ({"instruction": "Add.", "context": "1, 2", "response": "b", "system": "Be kind."}, "Be kind.", "Add.\n\n1, 2"),
        ({"system_prompt": "Be kind.", "question": "a", "response": "b"}, "Be kind.", "a"),
    ]
    for record, system, prompt in pairs:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}, ANSWERED]
        found, expected = read(record, "here"), read({"messages": messages}, "here")
        assert found.ids.tolist() == expected.ids.tolist()
        assert tokenizer.decode(trained(found)) == "b<|eot|>"
    sharegpt = {"system": "Be kind.", "conversations": FORMS["sharegpt"]["conversations"]}
    system_first = [{"role": "system", "content": "Be kind."}, QUESTION, ANSWERED]
    assert read(sharegpt, "").ids.tolist() == read({"messages": system_first, "system": "unused"}, "").ids.tolist()


NAMED: dict[str, tuple[dict[str, str], Any]] = {
    "pair": ({"prompt": "ask", "completion": "say"}, {"ask": "a", "say": "b", "messages": "unused"}),
    "pair with context": ({"prompt": "ask", "completion": "say", "context": "more"}, {"ask": "a", "say": "b", "more": None}),
    "of several pairs": (
        {"prompt": "question", "completion": "answer"}, {"question": "a", "answer": "b", "response": "worse"}),
    "messages": ({"messages": "dialogue"}, {"dialogue": [QUESTION, ANSWERED], "prompt": "a", "completion": "c"}),
    "keys": (
        {"messages": "turns", "role": "speaker", "content": "says"},
        {"turns": [{"speaker": "human", "says": "a"}, {"speaker": "gpt", "says": "b"}]}),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_a_recipe_may_name_the_fields(tmp_path: Path, case: str) -> None:
    section, record = NAMED[case]
    save_tokenizer(tmp_path)
    found = ChatReader(chat_context(tmp_path, **section))(record, "here")
    assert found.ids.tolist() == ChatReader(chat_context(tmp_path))(FORMS["messages"], "here").ids.tolist()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"messages": "a", "prompt": "b", "completion": "c"}, "set one of them"),
        ({"prompt": "b"}, "must be set together"),
        ({"context": "b"}, "needs chat.prompt"),
    ],
)
def test_names_that_contradict_one_another_are_refused(section: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatSection(**section)  # type: ignore[arg-type]


DESCRIBED: dict[str, tuple[Any, list[str]]] = {
    "messages": (
        {"id": 1, "messages": [QUESTION, ANSWERED]},
        ["each record is a list of messages, in field 'messages'", "fields that are not read: id"],
    ),
    "alpaca": (
        {"instruction": "a", "input": "c", "output": "b"},
        ["each record is a pair: field 'instruction', followed by 'input', is the prompt, and 'output' the completion"],
    ),
    "system": (
        {"system_prompt": "c", "question": "a", "response": "b"},
        ["field 'question' is the prompt, and 'response' the completion; 'system_prompt' is the system message"],
    ),
    "unclear": ({"question": "a", "answer": "b", "response": "c"}, ["the prompt and the completion may be"]),
}  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("case", DESCRIBED)
def test_inspect_says_which_fields_are_read(tmp_path: Path, case: str, form: str) -> None:
    import pyarrow
    import pyarrow.parquet

    record, expected = DESCRIBED[case]
    save_tokenizer(tmp_path)
    file = tmp_path / f"data.{form}"
    if form == "jsonl":
        file.write_text(json.dumps(record) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), file)
    lines = describe_chats(chat_context(tmp_path, str(file)))
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))


BAD: dict[str, tuple[Any, str]] = {
    "not an object": ([1], "must be a JSON object"),
    "no field": ({"text": "a"}, "has neither of the fields messages.*fields: text"),
    "only a prompt": ({"prompt": "a"}, "has neither of the fields"),
    "no list": ({"messages": "a"}, "field 'messages' is a text, not a list of messages, and not JSON"),
    "a text of no list": ({"messages": '{"role": "user"}'}, "'messages' contains an object, not a list of messages"),
    "a text of nothing": ({"messages": " "}, "'messages' contains null, not a list of messages"),
    "empty": ({"messages": []}, "contains an empty list"),
    "no message": ({"messages": ["a"]}, "message 1 of field 'messages' is a text, not an object, and not JSON"),
    "a number as message": ({"messages": ["5"]}, "message 1 of field 'messages' is a number, not an object"),
    "no role": ({"messages": [{"content": "a"}]}, "has no role"),
    "no content": ({"messages": [{"role": "user"}]}, "has no content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
        "part 2 of the content of message 1 of field 'messages' is of type 'image', and only text can be trained on",
    ),
    "no part": ({"messages": [{"role": "user", "content": ["a"]}]}, "part 1 of the content .* is a string without a text"),
    "a number": ({"messages": [{"role": "user", "content": 5}]}, "the content of message 1 .* is a number, not text"),
    "calls of tools": ({"conversations": [{"from": "function_call", "value": "f()"}]}, "calls of tools cannot be"),
    "several pairs": ({"prompt": "a", "completion": "b", "response": "c"}, "may be 'prompt' and 'completion', or"),
    "earlier turns": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' has earlier turns"),
    "tools": ({"messages": [QUESTION, ANSWERED], "tools": "f(x)"}, "'tools' is a text, not a list of tools, and not JSON"),
    "a tool that is text": ({"messages": [QUESTION, ANSWERED], "tools": ["f"]}, "tool 1 of field 'tools' is a text, not an"),
    "a call that is a number": (
        {"messages": [QUESTION, {**ANSWERED, "tool_calls": [5]}]},
        "call 1 of tool_calls of message 2 .* is a number, not",
    ),
    "calls in a text": ({"messages": [QUESTION, {**ANSWERED, "tool_calls": "f()"}]}, "tool_calls .* not a list of calls"),
    "a tool": ({"messages": [QUESTION, ANSWERED], "tools": {"name": "f"}}, "'tools' .* an object, not a list of tools"),
    "context of messages": ({"instruction": [QUESTION], "input": "a", "output": [ANSWERED]}, "'input' cannot follow"),
    "weight": ({"messages": [{**ANSWERED, "weight": 0.5}]}, "weight of message 1 .* is 0.5, not 0 or 1"),
    "nothing to train on": ({"messages": [QUESTION]}, "no message of the assistant"),
    "all excluded": ({"messages": [QUESTION, {**ANSWERED, "weight": 0}]}, "no message of the assistant"),
    "unknown sender": ({"conversations": [{"from": "bot", "value": "a"}]}, "message 1 .* is from 'bot'"),
    "mixed pair": ({"prompt": "a", "completion": [ANSWERED]}, "'prompt' is a text, not a list of messages"),
}


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_an_error_with_file_and_line(tmp_path: Path, case: str) -> None:
    record, message = BAD[case]
    save_tokenizer(tmp_path)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [QUESTION, ANSWERED]}) + "\n\n" + json.dumps(record) + "\n")
    shard = open_chats(chat_context(tmp_path, str(file))).shard(0, 1, 0)
    with pytest.raises(CorruptRecord, match=message) as error:
        list(shard)
    assert error.value.place == f"{file}:3"


def test_a_format_may_convert_records(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    ids = ChatReader(chat_context(tmp_path))(FORMS["messages"], "").ids.tolist()
    function = FormatSpec("to_chat", "data.format", Components.from_installed().get(RecordFormat, "to_chat").convert)
    template = FormatSpec('{"prompt": {{ instruction|tojson }}, "completion": {{ output|tojson }}}', "data.format")
    for spec, why in ((function, "KeyError"), (template, "data.format: 'output' is undefined")):
        read = ChatReader(replace(chat_context(tmp_path), format=spec))
        assert read({"instruction": "a", "output": "b"}, "").ids.tolist() == ids
        with pytest.raises(CorruptRecord, match=why):
            read({"instruction": "a"}, "here")
    text = ChatReader(replace(chat_context(tmp_path), format=FormatSpec("{{ output }}", "data.format")))
    with pytest.raises(CorruptRecord, match=r"the template in data\.format made a text that is not JSON"):
        text({"output": "b"}, "here")
