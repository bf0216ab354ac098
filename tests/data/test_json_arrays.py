"""JSON that is not one record a line: arrays, and records of several lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.tables import TEXTS
from titan_core.api import CorruptRecord, DatasetContext, ShuffledDocuments, UserError
from titan_data.record_files import open_local

pytestmark = pytest.mark.usefixtures("cache_folder")


ARRAYS: dict[str, str] = {
    "an array": json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False),
    "an indented array": json.dumps([{"text": text, "more": [1, {"a": "]"}]} for text in TEXTS], indent=2),
    "records of several lines": "\n".join(json.dumps({"text": text}, indent=1) for text in TEXTS),
    "blanks": " \n[ " + " ,\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n , ] \n",
}


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("form", ARRAYS)
def test_arrays_and_records_of_several_lines(
    form: str, mark: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_data.json_arrays._CHUNK", chunk)
    (tmp_path / "a.json").write_text(mark + ARRAYS[form])
    (tmp_path / "b.json").write_text('[{"text": "the last"}]')
    source = open_local(DatasetContext("json", str(tmp_path), "text", 0, "here", section=None, shuffle="none"))
    assert list(source.shard(0, 1, 0)) == [*TEXTS, "the last"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"', "not JSON at byte 16: "),
        ('[{"text": "a"} {"text": "b"}]', "not JSON at byte 15: records of an array must be separated by commas"),
        ('[{"text": "ä"}, nothing]', "not JSON at byte 17: "),
        ('[{"text": "a"}]]', "not JSON at byte 15: "),
    ],
)
def test_an_array_that_is_not_json_is_one_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError) as caught:
        open_local(DatasetContext("json", str(tmp_path), "text", 0, "here", section=None))
    assert str(caught.value).startswith(f"{tmp_path}/a.json: {message}")


def test_a_record_of_an_array_without_a_text_is_reported_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, 5]')
    shard = open_local(DatasetContext("json", str(tmp_path), "text", 0, "here", section=None, shuffle="none")).shard(0, 1, 0)
    assert next(shard) == "a"
    with pytest.raises(CorruptRecord) as caught:
        next(shard)
    assert caught.value.place == f"{tmp_path}/a.json, record 2" and "not a number" in caught.value.why


LARGE = {"text": "a long text", "more": [{"a": ["]", '"', "\\\\", "ü\\n"] * 9}], "end": '\\"]}'}


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("large", [LARGE, [LARGE], json.dumps(LARGE), "\\" * 501])
def test_a_record_that_is_too_large_is_corrupt(
    large: Any, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not parsed to find the next one, for what it becomes may take fifty times as much."""
    monkeypatch.setattr("titan_data.json_arrays._CHUNK", chunk)
    records = [{"text": "a"}, large, {"text": "b"}, large]
    for name, content in (
        ("array", json.dumps(records)),
        ("lines", "\n".join(json.dumps(one, indent=1) for one in records)),
    ):
        (tmp_path / name).write_text(content)
        context = DatasetContext(
            "json", str(tmp_path / name), "text", 0, "here", section=None, shuffle="none", max_record_bytes=200
        )
        source = open_local(context)
        assert isinstance(source, ShuffledDocuments) and len(source._documents) == 4
        assert [source._documents.text(number) for number in (0, 2)] == ["a", "b"]
        size = len(json.dumps(large, indent=None if name == "array" else 1))
        for number in (1, 3):
            with pytest.raises(
                CorruptRecord, match=rf"the record takes {size:,} bytes, more than data\.max_record_bytes = 200"
            ):
                source._documents.text(number)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '[{"text": "a"}, {"text": "' + "b" * 2000 + '"}]',
            "byte 16: the record takes more than 1,600 bytes, and has no end",
        ),
        ("[1, " + "7" * 2000 + "]", "byte 4: the record takes more than 200 bytes, and has no end yet"),
        ('[{"text": nothing}' + ', {"text": "a"}' * 100 + "]", "not JSON at byte 1: "),
        ('[{"text": "a"}, {"text": "' + "b" * 400, "not JSON at byte 16: "),
    ],
)
def test_a_record_without_an_end_ends_the_search(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_data.json_arrays._CHUNK", 64)
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=message):
        open_local(DatasetContext("json", str(tmp_path / "a.json"), "text", 0, "here", section=None, max_record_bytes=200))
