"""Dataset ``chat``: the ids are those of transformers, and only what the assistant writes has a loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from harness.chat_model import ANSWER, CHATS, MARKED, TEMPLATE, save_tokenizer, write_chats
from titan_core.api import (
    CorruptRecord,
    DatasetContext,
    ExcludedRecord,
    RecordFormat,
    Ref,
    TokenizerContext,
    UserError,
    WeightedTokens,
)
from titan_core.api.data.dataset import FormatSpec
from titan_core.api.data.tokenizer import TokenizerSpec
from titan_core.plugins.registry import Components
from titan_data.chat.config import ChatSection
from titan_data.chat.source import ChatReader, check_chats, describe_chats, open_chats

QUESTION, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def context(folder: Path, path: str | None = None, seq_len: int = 200, **section: Any) -> DatasetContext[ChatSection]:
    """Return the context of a job with the tokenizer in ``folder``; ``byte`` is the embedded one."""
    if folder.name == "byte":
        spec = TokenizerSpec(Ref[Any]("titan_core.data.byte_tokenizer:build"), TokenizerContext(section=None, path=None))
    else:
        spec = TokenizerSpec(
            Ref[Any]("titan_data.tokenizers.hugging_face:build"), TokenizerContext(section=None, path=str(folder))
        )
    return DatasetContext(
        section=ChatSection(**section),
        name="chat",
        path=path,
        text_field="text",
        seed=0,
        where="training.dataset_path",
        tokenizer_spec=spec,
        seq_len=seq_len,
    )


def trained(document: WeightedTokens) -> list[int]:
    assert set(numpy.unique(document.weights)) <= {0.0, 1.0} and document.whole
    return [int(token) for token, weight in zip(document.ids, document.weights, strict=True) if weight]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "by generation"])
def test_ids_and_mask_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = save_tokenizer(tmp_path, template)
    read = ChatReader(context(tmp_path))
    for chat in CHATS:
        expected = tokenizer.apply_chat_template(
            chat, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        found = read({"messages": chat}, "here")
        # transformers encodes the whole text, in which the end of a prompt may merge with its completion.
        assert tokenizer.decode(found.ids) == tokenizer.decode(expected["input_ids"])
        if not chat[2:]:
            assert found.ids.tolist() == expected["input_ids"]
            assert found.weights.tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "by generation"])
def test_a_prompt_has_the_ids_that_the_model_is_asked_with(tmp_path: Path, template: str) -> None:
    """The completion begins with a line end, which would merge with those at the end of the prompt."""
    template = template.replace(" | trim", "")
    tokenizer = save_tokenizer(tmp_path, template)
    chat = [QUESTION, {"role": "assistant", "content": "\nb"}]
    found = ChatReader(context(tmp_path))({"messages": chat}, "here")
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found.ids.tolist()[: len(prompt)] == prompt
    assert tokenizer.decode(found.ids[len(prompt) :]) == "\nb<|eot|>" == tokenizer.decode(trained(found))


@pytest.mark.parametrize(("train_on", "expected"), [("all", "Hello 🙂<|eot|>Bye.<|eot|>"), ("last", "Bye.<|eot|>")])
@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "by generation"])
def test_the_assistant_is_trained_on_with_the_end_of_its_turn(
    tmp_path: Path, train_on: str, expected: str, template: str
) -> None:
    tokenizer = save_tokenizer(tmp_path, template)
    trailing = [*CHATS[-1], {"role": "user", "content": "unanswered"}]
    found = ChatReader(context(tmp_path, train_on=train_on))({"messages": trailing}, "here")
    assert tokenizer.decode(trained(found)) == expected
    assert "unanswered" not in tokenizer.decode(found.ids)


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
    read = ChatReader(context(tmp_path))
    found, expected = read(FORMS[form], "here"), read(FORMS["messages"], "here")
    assert found.ids.tolist() == expected.ids.tolist() and found.weights.tolist() == expected.weights.tolist()


def test_an_input_follows_its_instruction_and_a_system_message_comes_first(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    read = ChatReader(context(tmp_path))
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
    found = ChatReader(context(tmp_path, **section))(record, "here")
    assert found.ids.tolist() == ChatReader(context(tmp_path))(FORMS["messages"], "here").ids.tolist()


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


CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "7"}
WITH_TOOLS = TEMPLATE.replace(
    ANSWER, "{{ m['content'] }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|eot|>"
).replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson if tools else '' }}")


def test_calls_of_tools_are_trained_on_if_the_template_renders_them(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, WITH_TOOLS)
    record = {"messages": [QUESTION, CALL, RESULT, ANSWERED], "tools": '[{"name": "f"}]'}  # some write a text of JSON
    text = tokenizer.decode(trained(ChatReader(context(tmp_path))(record, "here")))
    assert '"function": {"name": "f"' in text and text.endswith("<|eot|>b<|eot|>")
    assert ChatReader(context(tmp_path))({**record, "tools": ""}, "here").ids.size < 250


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        ({"messages": [QUESTION, CALL, ANSWERED]}, TEMPLATE, "message 2 calls tools, and the chat template does not render"),
        (
            {"messages": [QUESTION, ANSWERED], "tools": [{"name": "f"}]},
            TEMPLATE,
            "has tools, which the chat template does not",
        ),
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
        ChatReader(context(tmp_path))(record, "here")


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
    lines = describe_chats(context(tmp_path, str(file)))
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))


def test_messages_of_the_assistant_can_be_excluded_one_by_one(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    chat = [QUESTION, {**ANSWERED, "weight": 0}, QUESTION, {"role": "assistant", "content": "c"}]
    assert tokenizer.decode(trained(ChatReader(context(tmp_path))({"messages": chat}, "here"))) == "c<|eot|>"


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson }}"))
    found = ChatReader(context(tmp_path))({"messages": [QUESTION, ANSWERED], "tools": [{"name": "f"}]}, "here")
    assert '[{"name": "f"}]' in tokenizer.decode(found.ids)


def test_the_tokens_do_not_depend_on_the_day(tmp_path: Path) -> None:
    """Templates of Llama 3 write the date if there is a clock."""
    tokenizer = save_tokenizer(tmp_path, "{{ bos_token }}{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    found = ChatReader(context(tmp_path))({"messages": [QUESTION, ANSWERED]}, "here")
    assert tokenizer.decode(found.ids).startswith("<|begin|>26 Jul 2024<|begin|>")


@pytest.mark.parametrize("folder", ["byte", "hf"])
def test_pairs_without_a_template_are_documents(tmp_path: Path, folder: str) -> None:
    save_tokenizer(tmp_path / "hf", None)
    made = context(tmp_path / folder, template="none")
    assert made.tokenizer_spec is not None
    tokenizer: Any = made.tokenizer_spec.open()
    found = ChatReader(made)({"prompt": "2 + 2 =\n", "completion": "\n 4"}, "here")
    assert found.ids.tolist()[:1] == tokenizer.begin_ids
    assert trained(found) == [*tokenizer.encode_document("\n 4")[1:-1], *tokenizer.end_ids]
    with pytest.raises(CorruptRecord, match=r"messages, which chat\.template"):
        ChatReader(made)({"messages": [QUESTION, ANSWERED]}, "here")


def test_a_tokenizer_that_begins_texts_with_a_space_encodes_the_chat_as_a_whole(tmp_path: Path) -> None:
    """As Llama 2's does. A completion that is encoded on its own would get another space."""
    fast = save_tokenizer(
        tmp_path, "[{{ messages[0]['content'] }}]{% if messages[1] %} {{ messages[1]['content'] }}</s>{% endif %}"
    )
    vocab = {letter: number for number, letter in enumerate("▁abc[]")}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": fast.chat_template}))
    found = ChatReader(context(tmp_path))({"messages": [QUESTION, ANSWERED]}, "here")
    assert tokenizer.decode(found.ids.tolist(), skip_special_tokens=False) == " [a] b</s>"
    assert [tokenizer.id_to_token(token) for token in trained(found)] == ["▁", "b", "</s>"]


BAD: dict[str, tuple[Any, str]] = {
    "not an object": ([1], "must be a JSON object"),
    "no field": ({"text": "a"}, "has neither of the fields messages.*fields: text"),
    "only a prompt": ({"prompt": "a"}, "has neither of the fields"),
    "no list": ({"messages": "a"}, "'messages' contains a string, not a list"),
    "empty": ({"messages": []}, "contains an empty list"),
    "no message": ({"messages": ["a"]}, "message 1 of field 'messages' is a string"),
    "no role": ({"messages": [{"content": "a"}]}, "has no role"),
    "no content": ({"messages": [{"role": "user"}]}, "has no content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
        "part 2 of the content of message 1 of field 'messages' is of type 'image', and only text can be trained on",
    ),
    "no part": ({"messages": [{"role": "user", "content": ["a"]}]}, "part 1 of the content .* is a string without a text"),
    "a number": ({"messages": [{"role": "user", "content": 5}]}, "the content of message 1 .* is a number, not text"),
    "calls of tools": (
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        "calls of tools cannot be represented",
    ),
    "several pairs": (
        {"prompt": "a", "completion": "b", "response": "c"},
        "may be 'prompt' and 'completion', or 'prompt' and",
    ),
    "earlier turns": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' has earlier turns"),
    "tools": ({"messages": [QUESTION, ANSWERED], "tools": "f(x)"}, "'tools' is a text that is not JSON"),
    "a tool": (
        {"messages": [QUESTION, ANSWERED], "tools": {"name": "f"}},
        "'tools' contains an object, not a list of tools",
    ),
    "context of messages": (
        {"instruction": [QUESTION], "input": "a", "output": [ANSWERED]},
        "'input' cannot follow a prompt",
    ),
    "weight": ({"messages": [{**ANSWERED, "weight": 0.5}]}, "weight of message 1 .* is 0.5, not 0 or 1"),
    "nothing to train on": ({"messages": [QUESTION]}, "no message of the assistant"),
    "all excluded": ({"messages": [QUESTION, {**ANSWERED, "weight": 0}]}, "no message of the assistant"),
    "unknown sender": ({"conversations": [{"from": "bot", "value": "a"}]}, "message 1 .* is from 'bot'"),
    "mixed pair": ({"prompt": "a", "completion": [ANSWERED]}, "'prompt' contains a string"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_an_error_with_file_and_line(tmp_path: Path, case: str) -> None:
    record, message = BAD[case]
    save_tokenizer(tmp_path)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [QUESTION, ANSWERED]}) + "\n\n" + json.dumps(record) + "\n")
    shard = open_chats(context(tmp_path, str(file))).shard(0, 1, 0)
    with pytest.raises(CorruptRecord, match=message) as error:
        list(shard)
    assert error.value.place == f"{file}:3"


def test_a_template_that_refuses_a_chat_names_the_record(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + TEMPLATE)
    with pytest.raises(CorruptRecord, match="no system") as error:
        ChatReader(context(tmp_path))({"messages": CHATS[-1]}, "chats.jsonl:7")
    assert error.value.place == "chats.jsonl:7"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # The last message differs from the others, as in templates that remove thoughts.
        (
            TEMPLATE.replace(
                ANSWER, "{{ m['content'][:1] if m['role'] == 'assistant' and not loop.last else m['content'] }}<|eot|>"
            ),
            "differently if others",
        ),
        (TEMPLATE.replace("<|start|>assistant\n\n", "<|start|>assistant\n\n<think>"), "as a continuation of the prompt"),
    ],
    ids=["thoughts", "another prompt"],
)
def test_a_template_without_the_prefix_property_is_refused(tmp_path: Path, template: str, message: str) -> None:
    save_tokenizer(tmp_path, template)
    with pytest.raises(CorruptRecord, match=message):
        ChatReader(context(tmp_path))({"messages": CHATS[-1]}, "here")


def test_a_record_that_is_too_long_is_dropped_cut_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = save_tokenizer(tmp_path)
    record = {"messages": [QUESTION, {"role": "assistant", "content": "b" * 20}]}
    whole = ChatReader(context(tmp_path))(record, "here")
    fitting = context(tmp_path, seq_len=len(whole.ids) - 1)  # the last token is only a target
    assert ChatReader(fitting)(record, "here").ids.tolist() == whole.ids.tolist()
    short = replace(fitting, seq_len=len(whole.ids) - 3)
    with pytest.raises(ExcludedRecord, match=f"its {len(whole.ids)} tokens do not fit"):
        ChatReader(short)(record, "here")
    with pytest.raises(UserError, match=r"here: its .* tokens do not fit .* raise training.seq_len"):
        ChatReader(replace(short, section=ChatSection(too_long="stop")))(record, "here")
    cutting = replace(short, section=ChatSection(too_long="truncate"))
    cut = ChatReader(cutting)(record, "here")
    assert cut.ids.tolist() == whole.ids.tolist()[:-2] and tokenizer.decode(trained(cut)) == "b" * 19
    assert "cut off the end of a record: here: its" in caplog.text
    with pytest.raises(ExcludedRecord, match="nothing of the assistant's message is left"):
        ChatReader(replace(cutting, seq_len=8))(record, "here")


def json_array(file: Path) -> None:
    file.write_text(json.dumps([{"messages": chat} for chat in CHATS]))


def parquet(file: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat} for chat in CHATS]), file)


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_chats), ("a.json", json_array), ("a.parquet", parquet)],
    ids=["lines", "array", "parquet"],
)
def test_files_of_all_forms_hold_the_same_documents(
    tmp_path: Path, name: str, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    save_tokenizer(tmp_path)
    write(tmp_path / name)
    made = context(tmp_path, str(tmp_path / name))
    assert check_chats(made) == []
    read = ChatReader(made)
    expected = [read({"messages": chat}, "").ids.tolist() for chat in CHATS]
    found: list[Any] = list(open_chats(made).shard(0, 1, 0))
    assert sorted(document.ids.tolist() for document in found) == sorted(expected)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "needs the path"),
        ("missing/chats.jsonl", "no such file"),
        ("notes.txt", "is not a file that ends in"),
        ("mixed", "files of several forms"),
        ("empty.jsonl", "the dataset is empty"),
        ("broken.jsonl", "broken.jsonl:2: not a JSON record"),
        ("text.jsonl", "text.jsonl:1: has neither of the fields"),
    ],
)
def test_mistakes_in_the_path_are_found_before_training(in_tmp: Path, path: str | None, message: str) -> None:
    save_tokenizer(in_tmp)
    Path("notes.txt").write_text("a")
    Path("mixed").mkdir()
    Path("mixed/a.jsonl").write_text("{}")
    Path("mixed/a.parquet").write_text("")
    Path("empty.jsonl").write_text("\n")
    Path("broken.jsonl").write_text("\n{a\n")
    Path("text.jsonl").write_text('{"text": "a"}\n')
    (problem,) = check_chats(context(in_tmp, path))
    assert message in str(problem)


@pytest.mark.parametrize("folder", ["byte", "hf"])
def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, folder: str) -> None:
    save_tokenizer(tmp_path / "hf", None)
    write_chats(tmp_path / "chats.jsonl")
    (problem,) = check_chats(context(tmp_path / folder, str(tmp_path / "chats.jsonl")))
    assert "no chat template" in problem.why and "chat_template.jinja" in problem.fix


def test_a_template_that_ends_no_turn_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path, TEMPLATE.replace("<|eot|>", "\n"))
    ChatReader(context(tmp_path))
    assert "the model cannot learn where to stop" in caplog.text


def test_a_format_may_convert_records(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    ids = ChatReader(context(tmp_path))(FORMS["messages"], "").ids.tolist()
    function = FormatSpec("to_chat", "data.format", Components.from_installed().get(RecordFormat, "to_chat").convert)
    template = FormatSpec('{"prompt": {{ instruction|tojson }}, "completion": {{ output|tojson }}}', "data.format")
    for spec, why in ((function, "KeyError"), (template, "data.format: 'output' is undefined")):
        read = ChatReader(replace(context(tmp_path), format=spec))
        assert read({"instruction": "a", "output": "b"}, "").ids.tolist() == ids
        with pytest.raises(CorruptRecord, match=why):
            read({"instruction": "a"}, "here")
    text = ChatReader(replace(context(tmp_path), format=FormatSpec("{{ output }}", "data.format")))
    with pytest.raises(CorruptRecord, match=r"the template in data\.format made a text that is not JSON"):
        text({"output": "b"}, "here")
