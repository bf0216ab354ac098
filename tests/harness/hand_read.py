"""The provenance of a run, read from the files by hand: by nothing of titan-data and of the core's data engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest

from titan_core.cli.main import main

Ids = list[int]


def byte_ids(text: str) -> Ids:
    """Return the ids of the byte tokenizer."""
    return [256, *text.encode(), 257]


def line_of(place: str) -> str:
    """Return the text of ``FILE:LINE``."""
    file, _, number = place.rpartition(":")
    text = json.loads(Path(file).read_bytes().split(b"\n")[int(number) - 1])["text"]
    assert isinstance(text, str)
    return text


def row_of(place: str) -> str:
    """Return the text of ``FILE, row N`` of a Parquet file."""
    file, _, number = place.rpartition(", row ")
    text = pyarrow.parquet.read_table(file)["text"][int(number)].as_py()
    assert isinstance(text, str)
    return text


def text_at(place: str) -> str:
    """Return the text at the place of a line or of a row."""
    return row_of(place) if ", row " in place else line_of(place)


def rows_by_hand(documents: Sequence[dict[str, Any]], length: int, ids_at: Callable[[str], Ids]) -> list[list[int]]:
    """Return the rows of ``length`` tokens, by number, that the listed documents make."""
    rows: dict[int, list[int]] = {}
    for one in documents:
        ids = ids_at(one["place"])
        assert len(ids) == one["of"]
        rows.setdefault(one["row"], []).extend(ids[one["first_token"] : one["first_token"] + one["tokens"]])
    assert sorted(rows) == list(range(len(rows)))
    assert all(len(row) <= length for row in rows.values())
    return [rows[number] + [0] * (length - len(rows[number])) for number in range(len(rows))]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Return what ``titan ARGUMENTS --json`` prints."""
    capsys.readouterr()
    status = main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def documents_of(capsys: pytest.CaptureFixture[str], run: Path, step: int) -> list[dict[str, Any]]:
    """Return the documents that ``titan data step`` lists."""
    found = printed(capsys, "data", "step", run, step)
    assert found["step"] == step
    documents = found["documents"]
    assert isinstance(documents, list)
    return documents


def inputs_of(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the inputs of rows that are one token longer."""
    return numpy.array(rows)[:, :-1].tolist()
