"""Oddities of Parquet, Arrow, JSON, CSV and text files: their records are those that ``datasets`` yields for the same file,
or are refused with the column, its type and what to do, or differ for a reason that stands beside them.

``titan_data.arrow_values`` has the rule for types, and docs/data/files.md that for the rest.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from harness.odd_files import DAMAGED, ODDITIES, Oddity
from titan_core.api import CorruptRecord, DatasetContext, Document, DocumentShard, UserError
from titan_data.csv_files import open_csv_files
from titan_data.huggingface import StreamedDocuments
from titan_data.record_files import open_files
from titan_data.table_columns import Columns
from titan_data.text_files import open_text

# Older versions of the libraries do not write some of these files, and read fewer of them than Titan does.
OLDER = tuple(int(version(name).partition(".")[0]) for name in ("datasets", "pyarrow")) < (5, 26)
pytestmark = [pytest.mark.usefixtures("cache_folder"), pytest.mark.skipif(OLDER, reason="compares with datasets 5")]


QUICK = {"parquet": 5, "arrow": 7, "json": 3, "csv": 3, "text": 2}
"""Of so many rows, one is in the quick run."""


def titan(form: str, file: Path) -> list[Any]:
    context = DatasetContext(form, str(file), "text", 0, "here", section=None, shuffle="none")
    if form == "text":
        return ["".join(map(str, open_text(context).shard(0, 1, 0)))]
    if form == "csv":
        return list(open_csv_files(context, record).shard(0, 1, 0))
    return list(open_files(context, form, record, Columns(others=None)).shard(0, 1, 0))


def record(value: Any, place: str) -> Document:
    return value


def stream(form: str, file: Path) -> Any:
    import datasets

    more = {"sample_by": "document"} if form == "text" else {}
    return datasets.load_dataset(form, data_files=str(file), split="train", streaming=True, **more)


def hub(form: str, file: Path) -> DocumentShard:
    context = DatasetContext("hub", "a/b", "text", 0, "here", section=None)
    return StreamedDocuments(stream(form, file), context, record).shard(0, 1, 0)


def rows() -> list[Any]:
    counts = dict.fromkeys(QUICK, 0)
    found = []
    for oddity in ODDITIES:
        form = oddity.name.partition(":")[0]
        marks = [pytest.mark.full] if counts[form] % QUICK[form] else []
        counts[form] += 1
        found.append(pytest.param(oddity, id=oddity.name, marks=marks))
    return found


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("oddity", rows())
def test_records_are_those_of_datasets_or_refused(oddity: Oddity, tmp_path: Path) -> None:
    form = oddity.name.partition(":")[0]
    file = tmp_path / f"a.{ {'text': 'txt'}.get(form, form) }"
    oddity.write(file)
    try:
        expected: Any = list(stream(form, file))
    except Exception as raised:  # noqa: BLE001 - of any library
        expected = raised
    if form == "text" and isinstance(expected, list):
        expected = [one["text"] for one in expected]
    if oddity.refused:
        with pytest.raises((CorruptRecord, UserError)) as caught:
            titan(form, file)
        error = caught.value
        shown = f"{error.place}: {error.why}; {error.fix}" if isinstance(error, CorruptRecord) else str(error)
        assert (str(file) in shown or "here" in shown) and oddity.refused in shown and "; " in shown
        assert repr(expected) == repr(oddity.yields) if oddity.yields else isinstance(expected, Exception)
        if oddity.name.partition(": ")[2].partition(",")[0] in DAMAGED:
            with pytest.raises(UserError, match=r"dataset 'a/b': datasets cannot read its next records: .*; fix its files"):
                list(hub(form, file))
        return
    if oddity.yields is not None:
        assert repr(titan(form, file)) == repr(oddity.yields) != repr(expected)
        return
    assert expected, expected
    assert repr(titan(form, file)) == repr(expected)  # of values that equal others, such as 1 and True, the types too
    if form in ("parquet", "arrow"):  # and so has a dataset on the hub
        assert repr(list(hub(form, file))) == repr(expected)
