"""Local CSV and TSV files, whose first record names the columns (RFC 4180). A record is fetched through an index of record
ends that is built when the files are opened: a line end between quotes is part of a value."""

from __future__ import annotations

import csv
import io
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import CorruptRecord, DatasetContext, Document, DocumentSource, Problem, ShuffledDocuments, UserError
from titan_data.compressed import decompressed
from titan_data.local_files import EMPTY, EMPTY_FIX, ENDINGS, find_files, plain_suffix
from titan_data.records import FIELD_FIX, Reader, check_format, missing_field, reads_text

_CHUNK = 1 << 24
_LONGEST = 2**31 - 1
_SEPARATORS: Final = {".tsv": "\t"}
"""What separates values, by suffix; a comma elsewhere."""
_BOM = b"\xef\xbb\xbf"


class CsvRecords:
    """Records fetched by index, as mappings from the names of the columns to texts. Empty lines are skipped."""

    def __init__(self, files: Sequence[Path], shown: Sequence[Path], read: Reader) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.

        Raises:
            UserError: a file is not UTF-8, or its header does not name the columns.
        """
        csv.field_size_limit(_LONGEST)  # of the process; the default stops at 128 KiB, and documents are longer
        self._read, self._shown = read, shown
        self._contents = [_mapped(file) for file in files]
        self._separators = [separator_of(file) for file in shown]
        self._bounds = [record_bounds(content) for content in self._contents]
        self.columns = [
            header(content[starts[0] : ends[0]], separator, file) if len(starts) else []
            for content, (starts, ends), separator, file in zip(
                self._contents, self._bounds, self._separators, shown, strict=True
            )
        ]
        """The names of the columns of each file."""
        self._upto = list(accumulate(max(len(starts) - 1, 0) for starts, _ in self._bounds))

    def __len__(self) -> int:
        return self._upto[-1] if self._upto else 0

    def text(self, index: int) -> Document:
        """Return the document in record ``index``.

        Raises:
            CorruptRecord: it has another number of values than columns, is not UTF-8, or has no document.
        """
        number = bisect_right(self._upto, index)
        starts, ends = self._bounds[number]
        record = 1 + index - (self._upto[number - 1] if number else 0)
        place = f"{self._shown[number]}, record {record}"
        columns = self.columns[number]
        values = _values(self._contents[number][starts[record] : ends[record]], self._separators[number], place)
        if len(values) != len(columns):
            why = f"has {len(values)} values, but the header names {len(columns)} columns"
            raise CorruptRecord(place, why, "put values with separators or line ends between quotes")
        return self._read(dict(zip(columns, values, strict=True)), place)


def separator_of(file: Path) -> str:
    """Return what separates the values of ``file``."""
    return _SEPARATORS.get(plain_suffix(file), ",")


def header(content: bytes, separator: str, file: Path) -> list[str]:
    """Return the names of the columns.

    Raises:
        UserError: they are not UTF-8, empty, or not all different; or another character separates them.
    """
    try:
        names = _values(content.removeprefix(_BOM), separator, f"{file}, header")
    except CorruptRecord as error:
        raise UserError.one(error.place, error.why, error.fix) from None
    if len(names) == 1 and (other := next((one for one in ";\t,|" if one != separator and one in names[0]), None)):
        why = f"its header has one column, {names[0][:80]!r}: its values are separated by {other!r}, not by {separator!r}"
        raise UserError.one(str(file), why, "name it .tsv if tabs separate its values, or write it with commas")
    if len(set(names)) != len(names) or "" in names:
        why = f"its header has empty or equal names ({', '.join(map(repr, names))[:200]})"
        raise UserError.one(str(file), why, "give each column a name in the first line")
    return names


def record_bounds(content: mmap.mmap | bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first bytes and the end bytes of the records, without their line ends."""
    found, quotes = [], 0
    for at in range(0, len(content), _CHUNK):
        chunk = numpy.frombuffer(content[at : at + _CHUNK], numpy.uint8)
        inside = quotes + numpy.cumsum(chunk == ord('"'), dtype=numpy.int64)  # odd between quotes; doubled quotes cancel out
        found.append(numpy.flatnonzero((chunk == ord("\n")) & (inside % 2 == 0)) + at)
        quotes = int(inside[-1]) % 2
    ends = numpy.concatenate([*found, [len(content)]]).astype(numpy.int64)
    starts = numpy.concatenate([[0], ends[:-1] + 1])
    data = numpy.frombuffer(content, numpy.uint8)
    returned = (ends > starts) & (data[numpy.maximum(ends - 1, 0)] == ord("\r")) if len(data) else ends > starts
    ends = ends - returned  # a line end may be two characters
    filled = ends > starts
    return starts[filled], ends[filled]


def _values(content: bytes, separator: str, place: str) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptRecord(place, f"not UTF-8 text: {error.reason} at byte {error.start}", "convert it to UTF-8") from None
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True))
    except csv.Error as error:
        fix = "double the quotes in a value between quotes, and close each"
        raise CorruptRecord(place, f"not a record of CSV: {error}", fix) from None
    return rows[0] if rows else []


def _mapped(file: Path) -> mmap.mmap | bytes:
    with file.open("rb") as stream:
        # An empty file cannot be mapped.
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if file.stat().st_size else b""


def open_csv_files(context: DatasetContext[Any], read: Reader, field: str | None = None) -> DocumentSource:
    """Open the files at the dataset's path.

    Args:
        field: the only field that ``read`` needs, if it needs only one.

    Raises:
        UserError: a file cannot be read, contains no documents, or lacks the field.
    """
    files = find_files(context, ENDINGS["csv"])
    plain = decompressed(files)
    records = CsvRecords(plain, files, read)
    for file, columns in zip(files, records.columns, strict=True):
        if field is not None and columns and field not in columns:
            raise UserError.one(str(file), missing_field(field, columns), FIELD_FIX)
    if len(records) == 0:
        raise UserError.one(context.where, EMPTY, EMPTY_FIX)
    return ShuffledDocuments(records, context.seed, plain)


def open_csv(context: DatasetContext[None]) -> DocumentSource:
    """Open CSV or TSV files.

    Raises:
        UserError: a file cannot be read, contains no documents, or lacks the text field.
    """
    return open_csv_files(context, reads_text(context), None if context.format is not None else context.text_field)


def check_csv(context: DatasetContext[None]) -> list[Problem]:
    """Check that the files exist, and that the header of each that is not compressed names the text field."""
    try:
        problems = check_format(context)
        for file in find_files(context, ENDINGS["csv"]):
            if file.suffix not in (".csv", ".tsv") or context.format is not None:
                continue
            with file.open("rb") as stream:
                columns = header(_first_record(stream), separator_of(file), file) if file.stat().st_size else []
            if columns and context.text_field not in columns:
                problems.append(Problem(str(file), missing_field(context.text_field, columns), FIELD_FIX))
    except UserError as error:
        return list(error.problems)
    except OSError as error:
        return [Problem(context.where, f"cannot be read: {error.strerror or error}", "check its permissions")]
    return problems


def _first_record(stream: io.BufferedReader) -> bytes:
    record = b""
    while line := stream.readline():
        record += line
        if record.count(b'"') % 2 == 0 and record.strip(b"\r\n"):
            break
    return record.strip(b"\r\n")
