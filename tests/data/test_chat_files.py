"""Files of chats: all formats hold the same documents, and mistakes are found before training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.chat_model import CHATS, TEMPLATE, save_tokenizer, write_chats
from harness.chats import chat_context
from titan_data.chat.source import ChatReader, check_chats, open_chats


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
    made = chat_context(tmp_path, str(tmp_path / name))
    assert check_chats(made) == []
    read = ChatReader(made)
    expected = [read({"messages": chat}, "").ids.tolist() for chat in CHATS]
    found: list[Any] = list(open_chats(made).shard(0, 1, 0))
    assert sorted(document.ids.tolist() for document in found) == sorted(expected)


CALLED = "{{ c['function']['name'] }}({{ c['function']['arguments'] | tojson }})"
WITH_TOOLS = TEMPLATE.replace("{% for m", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m", 1).replace(
    "{{ m['content'] | trim }}", "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}CALLED{% endfor %}"
).replace("CALLED", CALLED)  # fmt: skip


def calls(*arguments: Any) -> list[dict[str, Any]]:
    """Return a record for each of the arguments, with which a tool is called."""
    return [
        {
            "tools": [{"name": "f", "parameters": {key: {"type": "string"} for key in given}}],
            "messages": [
                {"role": "user", "content": f"{number}?"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]},
                {"role": "tool", "content": json.dumps(given)},
                {"role": "assistant", "content": "It is ü."},
            ],
        }
        for number, given in enumerate(arguments)
    ]


DIFFERENT = calls({"city": "Köln"}, {"days": [1, 2.5], "unit": None}, {"a": {"b": [{"c": True}]}, "text": '"{'})


def as_datasets_writes(form: str, source: Path, file: Path) -> None:
    import datasets

    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(source.parent / "hf"))
    assert "Json" in str(rows.features) or source.name == "alike.jsonl"
    rows.save_to_disk(str(file)) if form == "disk" else rows.to_parquet(str(file))


def as_texts(file: Path, each: bool) -> None:
    """Write columns of texts of JSON, or of lists of such texts."""
    import pyarrow
    import pyarrow.parquet

    def text(value: list[Any]) -> Any:
        return [json.dumps(item) for item in value] if each else json.dumps(value)

    table = pyarrow.Table.from_pylist([{key: text(value) for key, value in record.items()} for record in DIFFERENT])
    pyarrow.parquet.write_table(table, file)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("form", ["lines", "parquet", "disk", "parquet, alike", "texts", "a text each"])
def test_calls_of_tools_have_the_ids_of_transformers_over_the_rows_of_datasets(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    tokenizer = save_tokenizer(tmp_path, WITH_TOOLS)
    records = calls({"city": "Köln"}, {"city": "Ulm"}) if form.endswith("alike") else DIFFERENT
    source = tmp_path / ("alike.jsonl" if form.endswith("alike") else "chats.jsonl")
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    file = tmp_path / "rows.parquet"
    if "text" in form:
        as_texts(file, "each" in form)
    elif form == "lines":
        file = source
    else:
        as_datasets_writes(form, source, file)
    made = chat_context(tmp_path, str(file), seq_len=2000)
    assert check_chats(made) == []
    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(tmp_path / "hf"))
    expected = [
        tokenizer.apply_chat_template(row["messages"], tools=row["tools"], chat_template=WITH_TOOLS, tokenize=False)
        for row in rows
    ]
    found: list[Any] = list(open_chats(made).shard(0, 1, 0))
    assert sorted(tokenizer.decode(document.ids) for document in found) == sorted(expected)
    assert all('"{' not in text or "\\" in text for text in expected)


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
    (problem,) = check_chats(chat_context(in_tmp, path))
    assert message in str(problem)


@pytest.mark.parametrize("folder", ["byte", "hf"])
def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, folder: str) -> None:
    save_tokenizer(tmp_path / "hf", None)
    write_chats(tmp_path / "chats.jsonl")
    (problem,) = check_chats(chat_context(tmp_path / folder, str(tmp_path / "chats.jsonl")))
    assert "no chat template" in problem.why and "chat_template.jinja" in problem.fix
