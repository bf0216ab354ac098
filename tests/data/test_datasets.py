"""Datasets are found, read and divided into shards, and mistakes in them are reported."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import CorruptRecord, DatasetContext, RecordFormat, Ref, TextPart, UserError
from titan_core.api.data.dataset import FormatSpec, encode_text
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_core.data.stdlib import open_stdlib
from titan_core.plugins.registry import Components
from titan_data.huggingface import StreamedDocuments
from titan_data.local_files import check_files
from titan_data.record_files import check_tables, open_local
from titan_data.records import reads_text
from titan_data.text_files import PIECE, TextPieces, open_text


def request(name: str, path: Path | None, field: str = "text") -> DatasetContext[None]:
    return DatasetContext(name, None if path is None else str(path), field, 0, "recipe: training.dataset_path", section=None)


def test_the_standard_library_is_a_corpus() -> None:
    texts = list(itertools.islice(open_stdlib(request("stdlib", None)).shard(0, 4, 0), 5))
    assert len(texts) == 5
    assert sum("import" in text for text in texts) >= 3


def test_text_files_are_cut_at_line_ends_without_loss(tmp_path: Path) -> None:
    lines = "".join(f"line {number} ü\n" for number in range(20_000))
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.md").write_text("no newline at the end")
    (tmp_path / "c.bin").write_text("not text")
    pieces = list(open_text(request("text", tmp_path)).shard(0, 1, 0))
    assert len(pieces) == 2 + (len(lines.encode()) - 4096) // PIECE
    assert sum(map(len, pieces)) == len(lines) + 21
    assert all(piece.endswith("\n") for piece in pieces if "line" in piece and piece != "no newline at the end")
    assert sum(piece.begins for piece in pieces) == sum(piece.ends for piece in pieces) == 2
    assert all(piece.begins == (piece[:6] in ("line 0", "no new")) for piece in pieces)


TEXTS = {
    "lines": "".join(f"line {number} ü\n" for number in range(500)),
    "one line": "word ü " * 700,
    "no spaces": "äöü中🙂x" * 500,
    "long characters": "🙂" * 400,
    "a short one": "abc",
}


@pytest.mark.quick_rows(8)
@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("size", [8, 16, 100, 512, 1 << 20])
@pytest.mark.parametrize("kind", TEXTS)
def test_pieces_of_any_size_are_the_whole_text(tmp_path: Path, kind: str, size: int, count: int) -> None:
    file, text = tmp_path / "a.txt", TEXTS[kind]
    file.write_text(text)
    pieces = TextPieces([file], [file], [file.stat().st_size], size)
    parts = [pieces.text(index) for index in range(len(pieces))]
    assert "".join(parts) == text
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    shards = [list(open_text(request("text", file)).shard(index, count, 0)) for index in range(count)]
    assert sum(len(part) for shard in shards for part in shard) == len(text)
    if len(text.encode()) >= 8 * (count + 1):
        assert all(shards)


def test_only_the_whole_text_begins_and_ends(tmp_path: Path) -> None:
    from harness.letters import BYTE

    text = "".join(f"line {number}\n" for number in range(9000))
    (tmp_path / "a.txt").write_text(text)
    parts = list(open_text(request("text", tmp_path)).shard(0, 1, 0))
    assert len(parts) > 2
    ids = [list(encode_text(BYTE, part)) for part in parts]
    assert sum(256 in one for one in ids) == sum(257 in one for one in ids) == 1
    whole = [one for _, one in sorted(zip((text.index(part) for part in parts), ids, strict=True))]
    assert list(itertools.chain(*whole)) == BYTE.encode_document(text).tolist()


def test_a_tokenizer_that_does_not_say_what_begins_a_text_marks_each_part() -> None:
    class Doubled(ByteTokenizer):
        def marks(self) -> None:
            return None

    part = TextPart("a", begins=False, ends=False)
    assert list(encode_text(Doubled(), part)) == [256, 97, 257]
    assert list(encode_text(ByteTokenizer(), part)) == [97]
    assert list(encode_text(ByteTokenizer(), TextPart("a", begins=True, ends=False))) == [256, 97]
    assert list(encode_text(ByteTokenizer(), "a")) == [256, 97, 257]


def test_bytes_that_are_not_text_are_reported_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\xfe")
    with pytest.raises(CorruptRecord) as caught:
        list(open_text(request("text", tmp_path)).shard(0, 1, 0))
    assert caught.value.place.endswith("a.txt")
    assert caught.value.why == "not UTF-8 text: invalid start byte at byte 5"


@pytest.mark.parametrize("kind", ["json", "parquet", "arrow"])
def test_local_records(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    texts = [f"document {number}" for number in range(10)]
    if kind == "json":
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in texts))
    else:
        path = tmp_path / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), path)
    if kind == "arrow":
        path = tmp_path / "data.arrow"
        with pyarrow.ipc.new_stream(str(path), pyarrow.schema([("body", pyarrow.string())])) as writer:
            writer.write_table(pyarrow.table({"body": texts}))
    check = check_files if kind == "json" else check_tables
    assert check(request(kind, path, "body")) == []
    (problem,) = check(request(kind, path))
    assert "no field 'text' (fields: body" in str(problem)
    if kind != "json":  # each JSON record may have different fields
        with pytest.raises(UserError, match=r"no field 'text' \(fields: body\)"):
            open_local(request(kind, path))
    documents = open_local(request(kind, path, "body"))
    assert documents.num_documents == 10
    assert sorted(text for index in range(3) for text in documents.shard(index, 3, 0)) == sorted(texts)


def test_parquet_files_may_have_other_columns_and_one_without_the_field_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    tables: list[dict[str, Any]] = [{"text": ["a"], "n": [1]}, {"url": ["u"], "text": ["b"]}, {"n": ["x"], "text": ["c"]}]
    for number, columns in enumerate(tables):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{number}.parquet")
    assert check_tables(request("parquet", tmp_path)) == []
    assert sorted(open_local(request("parquet", tmp_path)).shard(0, 1, 0)) == ["a", "b", "c"]
    pyarrow.parquet.write_table(pyarrow.table({"body": ["d"]}), tmp_path / "9.parquet")
    (problem,) = check_tables(request("parquet", tmp_path))
    assert str(problem).startswith(f"{tmp_path}/9.parquet: no field 'text' (fields: body)")
    with pytest.raises(UserError, match=r"9\.parquet: no field 'text' \(fields: body\)"):
        open_local(request("parquet", tmp_path))


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("files", [1, 2, 3, 8])
@pytest.mark.parametrize("shards", [1, 2, 4, 6])
def test_a_stream_is_divided_by_files_and_then_by_documents(tmp_path: Path, files: int, shards: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    for file in range(files):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps({"text": f"{file}-{i}"}) + "\n" for i in range(12)))
    stream = datasets.load_dataset("json", data_files=str(tmp_path / "*.jsonl"), split="train", streaming=True)
    documents = StreamedDocuments(stream, request("hub", tmp_path), reads_text(request("hub", tmp_path)))
    parts = [list(documents.shard(index, shards, 0)) for index in range(shards)]
    assert sorted(itertools.chain(*parts)) == sorted(f"{file}-{i}" for file in range(files) for i in range(12))
    assert max(map(len, parts)) - min(map(len, parts)) <= 12
    for index in range(shards):  # resume in the middle
        shard = documents.shard(index, shards, 0)
        done = list(itertools.islice(shard, 2))
        other = documents.shard(index, shards, 0)
        other.load_state_dict(json.loads(json.dumps(shard.state_dict())))
        third = documents.shard(index, shards, 0)
        third.load_state_dict(json.loads(json.dumps(other.state_dict())))  # saved again before any document was read
        assert [*done, *other] == parts[index]
        assert [*done, *third] == parts[index]


def test_a_missing_network_is_reported_in_one_line() -> None:
    from titan_data.huggingface import open_hub

    with pytest.raises(UserError, match="cannot be opened on the hub"):
        open_hub(request("c4", None))


BAD_LINES = {
    b'{"text": "a"}\n\n  \n{"text": "b"}\nnot json\n': (":5", "not a JSON record: Expecting value"),
    b'{"text": "a"}\n' + b" " * 40 + b"\r\n" + b" " * 40 + b'{"text": "b"}\nnot json\n': (
        ":4",
        "not a JSON record: Expecting",
    ),
    b'{"text": "a"}\n[1, 2]\n': (":2", "a record must be a JSON object, not an array"),
    b'{"text": "a"}\n{"body": "b"}': (":2", "no field 'text' (fields: body)"),
    b'{"text": "a"}\n{"text": null}': (":2", "field 'text' contains null, not text"),
    b'{"text": "a"}\n{"text": "\xff"}': (":2", "not UTF-8 text: invalid start byte at byte 10 of the line"),
}


@pytest.mark.parametrize("content", BAD_LINES)
def test_corrupt_lines_are_reported_with_their_place_and_the_others_are_read(tmp_path: Path, content: bytes) -> None:
    place, why = BAD_LINES[content]
    (tmp_path / "data.jsonl").write_bytes(content)
    shard = open_local(request("json", tmp_path)).shard(0, 1, 0)
    texts, errors = [], []
    while len(texts) + len(errors) < content.count(b"{") + content.count(b"not") + content.count(b"["):
        try:
            texts.append(next(shard))
        except CorruptRecord as error:
            errors.append(error)
    assert sorted(texts) == ["a", "b"][: content.count(b'"text": "') - content.count(b"\xff")]
    (error,) = errors
    assert error.place.endswith(f"data.jsonl{place}")
    assert error.why.startswith(why)


def test_a_formatting_function_returns_the_text(tmp_path: Path) -> None:
    records = [{"question": "who", "answer": "me"}, {"question": "where"}, {"question": "what", "answer": "this"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    joined = Components.from_installed().get(RecordFormat, "joined").convert
    formatted = replace(request("json", tmp_path), format=FormatSpec("joined", "data.format", joined))
    assert check_files(formatted) == []
    shard = open_local(formatted).shard(0, 1, 0)
    found: list[Any] = []
    while len(found) < 3:
        try:
            found.append(next(shard))
        except CorruptRecord as error:
            found.append(error.why)
    texts = [text for text in found if "plugin" not in text]
    assert sorted(texts) == ["what: this", "who: me"]
    (why,) = set(found).difference(texts)
    assert why.startswith("plugin 'harness' ") and why.endswith("format 'joined': convert raised KeyError: 'answer'")
    broken = replace(formatted, format=FormatSpec("broken", "data.format", Ref("harness.formats:missing")))
    (problem,) = check_files(broken)
    assert "has no attribute 'missing'" in str(problem)


def test_a_row_that_is_not_text_is_reported_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    texts = pyarrow.array([b"good", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "data.parquet")
    shard = open_local(request("parquet", tmp_path)).shard(0, 1, 0)
    found: list[Any] = []
    while len(found) < 2:
        try:
            found.append(next(shard))
        except CorruptRecord as error:
            found.append(f"{error.place.rpartition(', ')[2]}: {error.why}")
    assert sorted(found) == ["good", "row 1: not UTF-8 text: invalid start byte at byte 0"]


def test_extremely_deep_nesting_is_a_corrupt_record(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000 + "\n")
    shard = open_local(request("json", tmp_path)).shard(0, 1, 0)
    with pytest.raises(CorruptRecord, match="not a JSON record"):
        [next(shard), next(shard)]
