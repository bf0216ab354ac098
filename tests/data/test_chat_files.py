"""Files of chats: all formats hold the same documents, and mistakes are found before training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.chat_model import CHATS, save_tokenizer, write_chats
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
