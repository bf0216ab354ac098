"""A column of a Parquet or Arrow file that is missing, of the wrong type or null is reported with its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from harness.tables import FORMS, request, written
from titan_core.api import CorruptRecord, DatasetContext, Ref
from titan_core.api.data.dataset import FormatSpec
from titan_core.toolkit.reading import DocumentReader, ReadPolicy
from titan_data.foreign.config import InputIdsSection
from titan_data.foreign.input_ids import check_input_ids, open_input_ids
from titan_data.record_files import check_tables, open_local

pytestmark = pytest.mark.usefixtures("cache_folder")


COLUMNS: dict[str, tuple[pyarrow.Table, str]] = {
    "missing": (pyarrow.table({"body": ["a"]}), "no field 'text' (fields: body); set data.text_field, or data.format"),
    "numbers": (pyarrow.table({"text": [1]}), "column 'text' contains int64, not text; set data.text_field"),
    "lists": (pyarrow.table({"text": [["a"]]}), "column 'text' contains list<"),
    "bytes": (pyarrow.table({"text": [b"a"]}), "column 'text' contains binary, not text"),
    "twice": (pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"]), "has two columns 'text'; rename one"),
}


@pytest.mark.parametrize("form", ["snappy", "an Arrow file"])
@pytest.mark.parametrize("mistake", COLUMNS)
def test_a_column_that_is_missing_or_of_the_wrong_type_names_the_file(mistake: str, form: str, tmp_path: Path) -> None:
    table, message = COLUMNS[mistake]
    written(tmp_path / "data", form)
    FORMS[form](table, tmp_path / "data" / "9")
    (problem,) = check_tables(request(tmp_path / "data"))
    assert str(problem).startswith(f"{tmp_path}/data/9.{'arrow' if 'Arrow' in form else 'parquet'}: {message}")


JSON = pyarrow.array(['"a"', "5"], pyarrow.json_())
PAIRS = pyarrow.array([[("k", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
FORMATS = {
    "a template": (FormatSpec("{{ body }}", "data.format"), ""),
    "a template of the record": (FormatSpec("{{ record['body'] }}", "data.format"), "column 'more' contains map<"),
    "a template of the column": (FormatSpec("{{ body }}{{ more }}", "data.format"), "column 'more' contains map<"),
    "a function": (FormatSpec("joined", "data.format", Ref[Any]("harness.formats:joined")), "column 'more' contains map<"),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_type_that_is_not_read_is_refused_where_the_format_uses_it(case: str, tmp_path: Path) -> None:
    spec, refused = FORMATS[case]
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"], "more": PAIRS}), tmp_path / "a.parquet")
    asked = request(tmp_path, format=spec)
    found = [str(problem) for problem in check_tables(asked)]
    if refused:
        (problem,) = found
        assert problem.startswith(f"{tmp_path}/a.parquet: {refused}") and "; write the file without the column" in problem
    else:
        assert found == []
        assert sorted(open_local(asked).shard(0, 1, 0)) == ["a", "b"]  # type: ignore[type-var]


def test_texts_in_a_column_of_json_are_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": JSON}), tmp_path / "a.parquet")
    shard = open_local(request(tmp_path, shuffle="none")).shard(0, 1, 0)
    assert next(shard) == "a"
    with pytest.raises(CorruptRecord) as caught:
        next(shard)
    assert caught.value.why == "field 'text' contains a number, not text"


@pytest.mark.parametrize("form", ["snappy", "an Arrow file", "an Arrow stream"])
def test_a_template_reads_the_fields_of_json_values(form: str, tmp_path: Path) -> None:
    calls = pyarrow.array(['{"name": "f", "arguments": {"a": [1, null]}}', '{"name": "g", "arguments": 5}'], pyarrow.json_())
    FORMS[form](pyarrow.table({"call": calls}), tmp_path / "a")
    asked = request(tmp_path, format=FormatSpec("{{ call.name }}({{ call.arguments | tojson }})", "data.format"))
    assert sorted(open_local(asked).shard(0, 1, 0)) == ['f({"a": [1, null]})', "g(5)"]  # type: ignore[type-var]


def test_lists_of_token_ids_may_be_empty_or_null(tmp_path: Path) -> None:
    asked = DatasetContext("input_ids", str(tmp_path), "text", 0, "here", section=InputIdsSection(), vocab_size=300)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2]]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": pyarrow.array([[], []])}), tmp_path / "b.parquet")
    assert check_input_ids(asked) == []
    assert sorted(map(len, open_input_ids(asked).shard(0, 1, 0))) == [0, 0, 2]  # type: ignore[arg-type]
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": pyarrow.nulls(3)}), tmp_path / "c.parquet")
    (problem,) = check_input_ids(asked)
    assert "c.parquet: column 'input_ids' contains only nulls, not lists of token ids" in str(problem)
    assert check_input_ids(replace(asked, skip_corrupt=True)) == []


def test_a_column_of_nulls_is_corrupt_records(tmp_path: Path) -> None:
    """A writer that saw only nulls wrote the type null."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2)}), tmp_path / "b.parquet")
    (problem,) = check_tables(request(tmp_path))
    assert str(problem) == (
        f"{tmp_path}/b.parquet: column 'text' contains only nulls, not text; set data.text_field, or data.format, or "
        'data.on_corrupt = "skip"'
    )
    asked = request(tmp_path, shuffle="none", skip_corrupt=True)
    assert check_tables(asked) == []
    reader = DocumentReader(ReadPolicy("skip"), "rows")
    shard = open_local(asked).shard(0, 1, 0)
    assert [reader.next(shard) for _ in range(3)] == ["a", "b", None]
    assert reader.corrupt == 2


def test_columns_of_token_ids_are_integers(tmp_path: Path) -> None:
    asked = DatasetContext("input_ids", str(tmp_path), "text", 0, "here", section=InputIdsSection(), vocab_size=300)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2]], "labels": [[-100, 2]], "n": ["x"]}),
                                tmp_path / "a.parquet")  # fmt: skip
    assert check_input_ids(asked) == []
    (document,) = open_input_ids(asked).shard(0, 1, 0)
    assert document.weights.tolist() == [0, 1]  # type: ignore[union-attr]
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1.5]]}), tmp_path / "b.parquet")
    (problem,) = check_input_ids(asked)
    assert "b.parquet: column 'input_ids' contains list<" in str(problem) and "not lists of token ids" in str(problem)


@pytest.mark.parametrize("form", ["snappy", "zstd, small pages", "an Arrow stream", "an Arrow file"])
def test_a_null_is_reported_with_its_row_and_the_others_are_read(form: str, tmp_path: Path) -> None:
    FORMS[form](pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a")
    shard, found, errors = open_local(request(tmp_path)).shard(0, 1, 0), [], []
    while len(found) + len(errors) < 3:
        try:
            found.append(next(shard))
        except CorruptRecord as error:
            errors.append(error)
    assert sorted(found) == ["a", "b"]  # type: ignore[type-var]
    (error,) = errors
    assert error.place in (f"{tmp_path}/a.parquet, row 1", f"{tmp_path}/a.arrow, row 1")
    assert error.why == "field 'text' contains null, not text"
