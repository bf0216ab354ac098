"""Dataset ``input_ids``: records with token ids are read without their padding, and others are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.foreign_tokens import context, ids_of
from harness.kinds_of_data import IDS
from titan_core.api import CorruptRecord, ExcludedRecord
from titan_data.foreign.config import InputIdsSection
from titan_data.foreign.input_ids import check_input_ids, open_input_ids

pytestmark = pytest.mark.usefixtures("cache_folder")


def records(folder: Path, rows: list[dict[str, Any]], ending: str) -> Path:
    import datasets

    table = datasets.Dataset.from_list(rows)
    if ending == "saved":
        table.save_to_disk(str(folder / "saved"))
        return folder / "saved"
    if ending == "parquet":
        table.to_parquet(folder / "data.parquet")
        return folder / "data.parquet"
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"


@pytest.mark.parametrize("ending", ["saved", "parquet", "jsonl"])
def test_records_with_token_ids(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    rows = [{"input_ids": [*ids, 0, 0], "attention_mask": [1] * len(ids) + [0, 0],
             "labels": [-100, -100, *ids[2:], -100, -100]} for ids in IDS]  # fmt: skip
    asked = context("input_ids", records(tmp_path, rows, ending), InputIdsSection())
    assert check_input_ids(asked) == []
    found = list(open_input_ids(asked).shard(0, 1, 0))
    assert sorted(map(ids_of, found)) == sorted(IDS)
    assert all(document.weights.tolist() == [0, 0] + [1] * (len(document.ids) - 2) for document in found)


BAD_RECORDS: dict[str, tuple[Any, str]] = {
    "no column": ({"text": "a"}, "no field 'input_ids' (fields: text); set input_ids.column"),
    "text": ({"input_ids": "1 2 3"}, "column 'input_ids' contains a string that is not a list of token ids"),
    "lists": ({"input_ids": [[1, 2], [3]]}, "column 'input_ids' contains an array that is not a list of token ids"),
    "floats": ({"input_ids": [1.0, 2.0]}, "column 'input_ids' contains an array that is not a list of token ids"),
    "huge": ({"input_ids": [2**70]}, "column 'input_ids' contains an array that is not a list of token ids"),
    "outside": ({"input_ids": [1, 258]}, "token 1 has the id 258, but the largest id of the vocabulary is 257; set"),
    "negative": ({"input_ids": [1, -1]}, "token 1 has the id -1, but the largest id of the vocabulary is 257"),
    "labels": ({"input_ids": [1, 2], "labels": [2, -100]}, "label 0 is 2, but token 0 is 1: labels other than the tokens"),
    "short": ({"input_ids": [1, 2], "labels": [1]}, "column 'labels' has 1 values, but there are 2 token ids"),
    "holes": ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "its attention_mask is 0 between other tokens"),
    "a number": (5, "a record must be a JSON object, not a number"),
}


@pytest.mark.parametrize("mistake", BAD_RECORDS)
def test_records_that_are_not_token_ids_are_refused(mistake: str, tmp_path: Path) -> None:
    record, message = BAD_RECORDS[mistake]
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    asked = context("input_ids", tmp_path, InputIdsSection())
    (problem,) = check_input_ids(asked)
    assert f"a.jsonl:1: {message}" in str(problem)
    with pytest.raises(CorruptRecord):
        next(open_input_ids(asked).shard(0, 1, 0))


def test_records_without_a_loss_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 2], "labels": [1, -100]}) + "\n")
    asked = context("input_ids", tmp_path, InputIdsSection())
    assert check_input_ids(asked) == []
    with pytest.raises(ExcludedRecord, match="all of its labels are -100"):
        next(open_input_ids(asked).shard(0, 1, 0))
