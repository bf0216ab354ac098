"""Files of records with oddities: what a reader yields for each, or why it refuses it."""

from __future__ import annotations

import csv
import io
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest


class Secret(pyarrow.ExtensionType):  # type: ignore[misc]
    """A type of which a reader knows only how it is stored."""

    def __init__(self) -> None:
        super().__init__(pyarrow.string(), "acme.secret")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pyarrow.DataType, serialized: bytes) -> Secret:
        return cls()


def extension(of: pyarrow.DataType, values: list[Any]) -> pyarrow.Array:
    return pyarrow.ExtensionArray.from_storage(of, pyarrow.array(values, of.storage_type))


def lists_of(values: pyarrow.Array) -> pyarrow.Array:
    """Return a column of two lists that together contain ``values``."""
    return pyarrow.ListArray.from_arrays([0, 1, len(values)], values)


def features(name: str) -> Callable[[], pyarrow.Table]:
    """Return a table that ``datasets`` made of a feature of its own."""

    def table() -> pyarrow.Table:
        import datasets

        made: dict[str, tuple[Any, list[Any]]] = {
            "array": (datasets.Array2D((2, 2), "int32"), [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
            "label": (datasets.ClassLabel(names=["no", "yes"]), ["yes", "no"]),
            "translation": (datasets.Translation(["de", "en"]), [{"de": "Haus", "en": "house"}]),
            "json": (datasets.List(datasets.Json()), [[{"a": 1}, {"b": [None, "x"]}], []]),
            "json texts": (datasets.Json(decode=False), ['{"a": 1}']),
            "image": (datasets.Image(), [{"bytes": b"no image", "path": "a.png"}]),
            "image as stored": (datasets.Image(decode=False), [{"bytes": b"no image", "path": "a.png"}]),
        }
        feature, values = made[name]
        return datasets.Dataset.from_dict({"x": values}, datasets.Features({"x": feature})).data.table

    return table


JSON = ['{"a": {"b": [1, null]}}', "[true]", None, '"text"', "1.5", "null"]
COLUMNS: dict[str, Any] = {
    "JSON": pyarrow.array(JSON, pyarrow.json_()),
    "JSON in large strings": pyarrow.array(JSON, pyarrow.json_(pyarrow.large_string())),
    "JSON in lists": lists_of(pyarrow.array(JSON, pyarrow.json_())),
    "JSON in structs": pyarrow.StructArray.from_arrays([pyarrow.array(JSON, pyarrow.json_()), range(6)], ["j", "n"]),
    "JSON in structs in lists": lists_of(pyarrow.StructArray.from_arrays([pyarrow.array(JSON, pyarrow.json_())], ["j"])),
    "JSON of datasets": features("json"),
    "JSON that datasets does not decode": features("json texts"),
    "dictionary of texts": pyarrow.array(["a", "b", None, "a"]).dictionary_encode(),
    "dictionary of numbers": pyarrow.array([5, 6, 5]).dictionary_encode(),
    "dictionary in lists": lists_of(pyarrow.array(["a", "b", "a"]).dictionary_encode()),
    "dictionary in structs": pyarrow.StructArray.from_arrays([pyarrow.array(["a", "b"]).dictionary_encode()], ["f"]),
    "string view": pyarrow.array(["a", "too long to be kept inline", None], pyarrow.string_view()),
    "binary view": pyarrow.array([b"a", None], pyarrow.binary_view()),
    "large string": pyarrow.array(["a", None], pyarrow.large_string()),
    "large binary": pyarrow.array([b"\xff", None], pyarrow.large_binary()),
    "binary of one size": pyarrow.array([b"ab", None], pyarrow.binary(2)),
    "large list": pyarrow.array([[1], [], None, [2, None]], pyarrow.large_list(pyarrow.int64())),
    "list of one size": pyarrow.array([[1, 2], None], pyarrow.list_(pyarrow.int64(), 2)),
    "decimal128": pyarrow.array([Decimal("1.50"), None], pyarrow.decimal128(5, 2)),
    "decimal256": pyarrow.array([Decimal("1.50")], pyarrow.decimal256(50, 2)),
    "timestamp": pyarrow.array([1, None], pyarrow.timestamp("s")),
    "timestamp of nanoseconds": pyarrow.array([1_000_000_001], pyarrow.timestamp("ns")),
    "timestamp with a zone": pyarrow.array([1], pyarrow.timestamp("us", "Europe/Berlin")),
    "timestamp with an offset": pyarrow.array([1], pyarrow.timestamp("us", "+02:00")),
    "dates": pyarrow.array([1, None], pyarrow.date32()),
    "dates of milliseconds": pyarrow.array([86_400_000], pyarrow.date64()),
    "time": pyarrow.array([1], pyarrow.time64("us")),
    "duration": pyarrow.array([1], pyarrow.duration("s")),
    "duration of nanoseconds": pyarrow.array([1001], pyarrow.duration("ns")),
    "float16": pyarrow.array(numpy.array([1.5], numpy.float16)),
    "uint64": pyarrow.array([2**64 - 1], pyarrow.uint64()),
    "nulls": pyarrow.nulls(2),
    "lists of nulls": pyarrow.array([[], [None]], pyarrow.list_(pyarrow.null())),
    "arrays of datasets": features("array"),
    "labels of datasets": features("label"),
    "translations of datasets": features("translation"),
    "images of datasets as they are stored": features("image as stored"),
}


def dictionaries(*batches: tuple[list[int], list[str]]) -> pyarrow.ChunkedArray:
    """Return batches of numbers into a dictionary each."""
    return pyarrow.chunked_array([pyarrow.DictionaryArray.from_arrays(numbers, texts) for numbers, texts in batches])


CHANGING = dictionaries(([0, 1], ["a", "b"]), ([1, 0], ["c", "d"]))
GROWING = dictionaries(([0, 1], ["a", "b"]), ([2, 0], ["a", "b", "c"]))
REFUSED: dict[str, tuple[Any, str]] = {
    "UUID": (extension(pyarrow.uuid(), [uuid.UUID(int=5).bytes]), "the extension type arrow.uuid"),
    "bool8": (extension(pyarrow.bool8(), [1, 0]), "the extension type arrow.bool8"),
    "bool8 in structs in lists": (
        lists_of(pyarrow.StructArray.from_arrays([extension(pyarrow.bool8(), [1, 0])], ["f"])),
        "the extension type arrow.bool8",
    ),
    "tensors": (
        extension(pyarrow.fixed_shape_tensor(pyarrow.int32(), [2, 2]), [[1, 2, 3, 4]]),
        "the extension type arrow.fixed_shape_tensor",
    ),
    "opaque": (extension(pyarrow.opaque(pyarrow.string(), "t", "v"), ["a"]), "the extension type arrow.opaque"),
    "unknown": (extension(Secret(), ["a", "b"]), "the extension type acme.secret"),
    "unknown in lists": (lists_of(extension(Secret(), ["a", "b"])), "the extension type acme.secret"),
    "run-end encoded": (pyarrow.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]), "run_end_encoded<"),
    "list view": (pyarrow.array([[1], None], pyarrow.list_view(pyarrow.int64())), "list_view<"),
    "map": (pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())), "map<string, int64"),
    "map in lists": (
        pyarrow.array([[[("k", 1)]]], pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.int64()))),
        "map<str",
    ),
    "decimal32": (pyarrow.array([Decimal("1.5")], pyarrow.decimal32(5, 2)), "decimal32(5, 2)"),
    "interval": (pyarrow.array([(1, 2, 3)], pyarrow.month_day_nano_interval()), "month_day_nano_interval"),
    "union": (
        pyarrow.UnionArray.from_sparse(
            pyarrow.array([0, 1], pyarrow.int8()), [pyarrow.array(["a", "b"]), pyarrow.array([1, 2])]
        ),
        "sparse_union<",
    ),
    "dictionary of lists": (
        pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1]), pyarrow.array([[1], [2]])),
        "dictionary<values=list<",
    ),
    "two fields of one name": (
        pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["f", "f"]),
        "struct<f: int64, f: int64>, which has two fields of one name",
    ),
    "images of datasets": (features("image"), "the type Image of datasets"),
}
UNNOTICED = {
    "unknown": [{"x": "a"}, {"x": "b"}],
    "unknown in lists": [{"x": ["a"]}, {"x": ["b"]}],
    "two fields of one name": [{"x": {"f": 2}}],
}
"""What ``datasets`` yields of types that it does not know, either."""
DAMAGED: dict[str, tuple[pyarrow.Array, str]] = {
    "text that is not JSON": (pyarrow.array(["{no"], pyarrow.json_()), "(extension<arrow.json>) has a value that cannot"),
    "no such zone": (pyarrow.array([1], pyarrow.timestamp("us", "Mars/Olympus")), "(timestamp[us, tz=Mars/Olympus]) has"),
    "after the year 9999": (pyarrow.array([2**30], pyarrow.date32()), "(date32[day]) has a value that cannot be read"),
    "a long duration": (pyarrow.array([2**62], pyarrow.duration("s")), "(duration[s]) has a value that cannot be read"),
}
NOT_IN_PARQUET = {"run-end encoded", "interval", "union", "dictionary of lists"}


def parquet(table: pyarrow.Table, file: Path) -> None:
    pyarrow.parquet.write_table(table, file)


def parquet_alone(table: pyarrow.Table, file: Path) -> None:
    """As other libraries write it: with the types of Parquet, and not of Arrow."""
    pyarrow.parquet.write_table(table, file, store_schema=False)


def arrow_file(table: pyarrow.Table, file: Path) -> None:
    with pyarrow.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)


def arrow_stream(table: pyarrow.Table, file: Path) -> None:
    with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


def arrow_deltas(table: pyarrow.Table, file: Path) -> None:
    """Of a dictionary that grows, write in each batch what is new."""
    options = pyarrow.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pyarrow.ipc.new_stream(str(file), table.schema, options=options) as writer:
        writer.write_table(table)


WRITERS: tuple[Callable[[pyarrow.Table, Path], None], ...] = (parquet, parquet_alone, arrow_file, arrow_stream)


@dataclass(frozen=True)
class Oddity:
    name: str
    write: Callable[[Path], Any]
    refused: str = ""
    """Part of the error."""
    yields: list[Any] | None = None
    """What Titan yields, or, of a file that it refuses, what ``datasets`` yields, if not the same as the other."""


def of_column(name: str, column: Any, write: Callable[[pyarrow.Table, Path], None], **more: Any) -> Oddity:
    def written(file: Path) -> None:
        write(column() if callable(column) else pyarrow.table({"x": column}), file)

    return Oddity(f"{'arrow' if 'arrow' in write.__name__ else 'parquet'}: {name}, {write.__name__}", written, **more)


def tabular() -> list[Oddity]:
    rows = [of_column(name, column, write) for name, column in COLUMNS.items() for write in WRITERS]
    rows += [of_column("a dictionary that changes", CHANGING, write) for write in (parquet, arrow_stream)]
    rows += [of_column("a dictionary that grows", GROWING, write) for write in (arrow_stream, arrow_deltas)]
    for name, (column, refused) in REFUSED.items():
        for write in (parquet, arrow_file, arrow_stream):
            if write is parquet and name in NOT_IN_PARQUET:
                continue
            why = f"column 'x' contains {refused}"
            rows.append(of_column(name, column, write, refused=why, yields=UNNOTICED.get(name)))
    rows += [
        of_column(name, column, write, refused=f"column 'x' {why}")
        for name, (column, why) in DAMAGED.items()
        for write in (parquet, arrow_file, arrow_stream)
    ]
    return rows


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def sheet(*rows: list[str], **options: Any) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream, **options).writerows(rows)
    return stream.getvalue().encode()


FRAME: Any = pytest.importorskip("pandas").DataFrame({"a": ["x", 'y "z"\n,'], "b": ["ü", "🙂"]})
CALLS = [{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}, {"tool_calls": [{"name": "g", "arguments": {"b": ["x"]}}]}]
"""Records of which ``datasets`` makes a column of JSON."""
BOM = b"\xef\xbb\xbf"

JSON_FILES: dict[str, bytes] = {
    "lines": lines({"a": 1, "b": "ü"}, {"a": 2, "b": None}),
    "CRLF, and no end of the last line": b'{"a": "x"}\r\n{"a": "y"}',
    "blank lines": b'\n{"a": "x"}\n\n \n{"a": "y"}\n\n',
    "a byte order mark": BOM + lines({"a": "x"}, {"a": "y"}),
    "an array": json.dumps([{"a": "x"}, {"a": "y"}], indent=2).encode(),
    "indented objects": b"\n".join(json.dumps({"a": text}, indent=2).encode() for text in "xy"),
    "pandas": FRAME.to_json(orient="records").encode(),
    "lines of pandas": FRAME.to_json(orient="records", lines=True).encode(),
    "types that differ": lines({"a": 1}, {"a": "x"}),
    "objects that differ": lines({"a": {"x": 1}}, {"a": {"y": [2]}}),
    "calls of tools": lines(*CALLS),
    "empty lists and objects": lines({"a": [], "b": {}}, {"a": [1], "b": {}}),
    "a pair of surrogates": b'{"a": "\\ud83d\\ude00"}\n',
    "characters that end lines elsewhere": '{"a": "x\u2028\u0085y\\u0000"}\n'.encode(),
    "JSON in a text": lines({"a": json.dumps({"b": 1})}),
    "a long line": lines({"a": "x" * (1 << 20)}),
}
JSON_DECIDED: dict[str, tuple[bytes, list[Any]]] = {
    "a text that looks like a date is a text": (
        lines({"a": "2024-01-01"}, {"a": "2024-01-02"}),
        [{"a": "2024-01-01"}, {"a": "2024-01-02"}],
    ),
    "a field that a record lacks is absent": (lines({"a": 1}, {"b": 2}), [{"a": 1}, {"b": 2}]),
    "integers are exact": (lines({"a": 2**64 - 1}, {"a": 10**30}), [{"a": 2**64 - 1}, {"a": 10**30}]),
    "an integer beside a float is one": (lines({"a": 1}, {"a": 1.5}), [{"a": 1}, {"a": 1.5}]),
}
JSON_REFUSED = {
    "3,000 lists": (
        b'{"a": "x", "unused": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
        "its lists and objects are nested too deeply",
    ),
    "3,000 lists in an array": (b'[{"a": "x", "unused": ' + b"[" * 3000 + b"]" * 3000 + b"}]", "are nested too deeply"),
    "Latin-1": ('{"a": "é"}\n'.encode("latin-1"), "not UTF-8 text"),
    "UTF-16": ('{"a": "é"}\n'.encode("utf-16"), "not UTF-8 text"),
    "quotes of Python": (b"{'a': 1}\n", "not a JSON record"),
    "a control character": (b'{"a": "x\ty"}\n', "not a JSON record: Invalid control character"),
    "a comma at the end": (b'{"a": 1,}\n', "not a JSON record"),
    "nothing": (b"", "the dataset is empty"),
}
CSV_FILES: dict[str, bytes] = {
    "commas, quotes and lines": sheet(["a", "b"], ["x,y", 'say "hi"'], ["two\nlines", "v"]),
    "all between quotes": sheet(["a", "b"], ["x", "y"], quoting=csv.QUOTE_ALL),
    "LF": b"a,b\nx,y\nz,w",
    "CR": b"a,b\rx,y\rz,w\r",
    "CR, LF and both": b"a,b\nx,y\r\nz,w\ru,v\n",
    "CR between quotes": b'a,b\r"x\ry",z\ru,v\r',
    "a quote within a value": b'a,b\n5" pipe,y\nz,6" pipe\nu,v\n',
    "a byte order mark": BOM + b'"a",b\nx,y\n',
    "blank lines": b"a,b\n\nx,y\n\n\n",
    "blanks": b"a, b\nx , y\n",
    "characters that end lines elsewhere": "a,b\nx\u2028\u0085\x0b\x0cy,z\n".encode(),
    "a long value": b"a,b\n" + b"x" * 200_000 + b",y\n",
    "pandas": FRAME.to_csv(index=False).encode(),
}
CSV_DECIDED: dict[str, tuple[bytes, list[Any]]] = {
    "each value is a text": (sheet(["a", "b"], ["007", "True"]), [{"a": "007", "b": "True"}]),
    "NA and nothing are texts": (
        sheet(["a", "b"], ["NA", ""], ["x", "null"]),
        [{"a": "NA", "b": ""}, {"a": "x", "b": "null"}],
    ),
    "the index of pandas has its name": (FRAME[:1].to_csv().encode(), [{"Unnamed: 0": "0", "a": "x", "b": "ü"}]),
}
CSV_REFUSED = {
    "more values than columns": (b"a,b\nx,y\nx,y,z\n", "has 3 values, but the header names 2 columns"),
    "an open quote": (b'a,b\n"x,y\n', "not a record of CSV: unexpected end of data"),
    "Latin-1": ("a,b\né,y\n".encode("latin-1"), "not UTF-8 text"),
    "nothing": (b"", "the dataset is empty"),
}
TEXT_FILES: dict[str, bytes] = {
    "lines": b"a\nb\n\n\n",
    "no end of the last line": b"a\nb",
    "characters that end lines elsewhere": "\ufeffa\u2028\u0085\x0b\x0c\x00b 🙂\n".encode(),
    "some pieces": "".join(f"line {number} ü\n" for number in range(20_000)).encode(),
}
TEXT_DECIDED = {"line ends are kept": (b"a\r\nb\rc\n", ["a\r\nb\rc\n"])}
TEXT_REFUSED = {"Latin-1": ("é\n".encode("latin-1"), "not UTF-8 text"), "UTF-16": ("a".encode("utf-16"), "not UTF-8 text")}


def files() -> list[Oddity]:
    def of(form: str, name: str, content: bytes, **more: Any) -> Oddity:
        return Oddity(f"{form}: {name}", lambda file: file.write_bytes(content), **more)

    rows = []
    for form, same, decided, refused in (
        ("json", JSON_FILES, JSON_DECIDED, JSON_REFUSED),
        ("csv", CSV_FILES, CSV_DECIDED, CSV_REFUSED),
        ("text", TEXT_FILES, TEXT_DECIDED, TEXT_REFUSED),
    ):
        rows += [of(form, name, content) for name, content in same.items()]
        rows += [of(form, name, content, yields=yields) for name, (content, yields) in decided.items()]
        rows += [of(form, name, content, refused=why) for name, (content, why) in refused.items()]
    return rows


ODDITIES = [*tabular(), *files()]
