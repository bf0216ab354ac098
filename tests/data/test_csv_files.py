"""CSV and TSV files are read as Python's own library reads them, record by record."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import random
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import CorruptRecord, DatasetContext, UserError
from titan_data import csv_files
from titan_data.csv_files import check_csv, open_csv


def request(path: Path, field: str = "text") -> DatasetContext[None]:
    return DatasetContext("csv", str(path), field, 0, "training.dataset_path", section=None)


def written(rows: list[list[str]], ends: str, quoting: Any, separator: str = ",") -> str:
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator=ends, quoting=quoting, delimiter=separator).writerows(rows)
    return stream.getvalue()


def rows_of(seed: int, count: int = 60, alone: int = 0) -> list[list[str]]:
    chosen = random.Random(seed)
    pieces = ["a", "ü", '"', '""', ",", "\t", "\n", "\r\n", *("\r" for _ in range(alone)), " ", "🙂", ";", "word"]
    return [[str(number), "".join(chosen.choices(pieces, k=chosen.randint(0, 12)))] for number in range(count)]


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 24])
@pytest.mark.parametrize(
    ("quoting", "ends"),
    [(csv.QUOTE_MINIMAL, "\n"), (csv.QUOTE_MINIMAL, "\r\n"), *((csv.QUOTE_ALL, ends) for ends in ("\n", "\r\n", "\r"))],
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_records_are_those_of_the_csv_module(
    tmp_path: Path, name: str, ends: str, quoting: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "_CHUNK", chunk)
    rows = rows_of(len(name) + chunk, alone=quoting == csv.QUOTE_ALL)  # else, the writer does not quote a lone CR
    content = written([["id", "text"], *rows], ends, quoting, "\t" if name.endswith("tsv") else ",")
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    source = open_csv(request(tmp_path))
    assert source.num_documents == len(rows)
    assert sorted(source.shard(0, 1, 0)) == sorted(text for _, text in rows)


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.full), 3, pytest.param(1 << 24, marks=pytest.mark.full)]
)
def test_quotes_within_values_are_characters(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file of two columns has the records that the csv module finds in it: 5" is a value, and does not begin one."""
    monkeypatch.setattr(csv_files, "_CHUNK", chunk)
    chosen, expected, files = random.Random(0), [], []
    for number in range(200):
        content = "x,y\n" + "".join(chosen.choices(["a", '"', '"', ",", "\n", "\r", '",', ',"'], k=12))
        with contextlib.suppress(csv.Error):
            expected += [row for row in csv.reader(io.StringIO(content, newline=""), strict=True) if len(row) == 2][1:]
            files.append(tmp_path / f"{number:03}.csv")
            files[-1].write_text(content, newline="")
    records, found = csv_files.CsvRecords(files, files, lambda record, place: record), []
    for index in range(len(records)):
        with contextlib.suppress(CorruptRecord):  # has another number of values
            found.append([*records.text(index).values()])  # type: ignore[union-attr]
    assert len(files) > 50
    assert found == expected


def test_compressed_files_and_files_with_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.csv").write_text("\ufefftext,id\na,1\n\n\nb,2")  # with a byte order mark, and no line end at the end
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"source,text\nx,c\n"))
    (tmp_path / "c.csv").write_text("text\nd\n")
    assert check_csv(request(tmp_path)) == []
    assert sorted(open_csv(request(tmp_path)).shard(0, 1, 0)) == ["a", "b", "c", "d"]


def test_a_long_value_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 300_000}\n")
    assert list(map(len, open_csv(request(tmp_path)).shard(0, 1, 0))) == [300_000]


MISTAKES = {
    "no column": ("id,body\n1,a\n", "no field 'text' (fields: id, body); set data.text_field, or data.format"),
    "another separator": ("id;text\n1;a\n", "header has one column, 'id;text': its values are separated by ';', not"),
    "names": ("text,text\n1,a\n", "its header has equal names ('text', 'text'); give each column a name of its own"),
    "an open quote": ('"text\n1,a\n', "not a record of CSV: unexpected end of data"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_header_names_the_file(tmp_path: Path, mistake: str) -> None:
    content, message = MISTAKES[mistake]
    (tmp_path / "good.csv").write_text("text\na\n")
    (tmp_path / "other.csv").write_text(content)
    (problem,) = check_csv(request(tmp_path))
    assert f"{tmp_path}/other.csv" in str(problem) and message in str(problem)
    with pytest.raises(UserError) as caught:
        open_csv(request(tmp_path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"1,a,b", "record 2: has 3 values, but the header names 2 columns; put values with separators"),
        (b"1,\xff", "record 2: not UTF-8 text: invalid start byte at byte 2; convert it to UTF-8"),
        (b'1,"a"b', "record 2: not a record of CSV: ',' expected after"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,text\n0,good\n" + record + b"\n")
    shard, texts, found = open_csv(request(tmp_path)).shard(0, 1, 0), [], []
    for _ in range(2):
        try:
            texts.append(next(shard))
        except CorruptRecord as error:
            found.append(f"{error.place}: {error.why}; {error.fix}")
    assert texts == ["good"]
    assert message in found[0]


@pytest.mark.parametrize("content", ["", "\n\n", "text\n", "text\n\n"])
def test_files_without_records_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match="the dataset is empty"):
        open_csv(request(tmp_path))
