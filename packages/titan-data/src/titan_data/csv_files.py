"""Local CSV and TSV files, whose first record names the columns (RFC 4180). A record is fetched through an index of records
(:mod:`titan_data.file_index`): a line end between quotes is part of a value."""

from __future__ import annotations

import csv
import io
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import CorruptRecord, DatasetContext, Document, DocumentSource, Problem, ShuffledDocuments, UserError
from titan_core.toolkit.files import open_file
from titan_data.compressed import decompressed
from titan_data.file_documents import FileDocuments
from titan_data.file_index import FileIndex
from titan_data.limits import DEFAULT, LOCATED, endless, too_large
from titan_data.local_files import EMPTY, EMPTY_FIX, ENDINGS, find_files, plain_suffix
from titan_data.records import FIELD_FIX, Reader, check_format, missing_field, reads_text
from titan_data.storage import problems

_CHUNK, _FEW = 1 << 24, 1 << 16
_LONGEST = 2**31 - 1
_SEPARATORS: Final = {".tsv": "\t"}
"""What separates values, by suffix; a comma elsewhere."""
_BOM: Final = b"\xef\xbb\xbf"
_LF, _CR, _QUOTE = b'\n\r"'


class CsvRecords(FileDocuments):
    """Records fetched by index, as mappings from the names of the columns to texts. Empty lines are skipped."""

    mark = ", record "

    def __init__(self, files: Sequence[Path], shown: Sequence[Path], read: Reader, limit: int = DEFAULT) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.
            limit: bytes of a record.

        Raises:
            UserError: a file is not UTF-8, its header does not name the columns, or a record does not end.
        """
        csv.field_size_limit(_LONGEST)  # of the process; the default stops at 128 KiB, and documents are longer
        self._files, self._read, self._shown, self._limit = files, read, shown, limit
        self._separators = [separator_of(file) for file in shown]
        of = dict(zip(files, zip(self._separators, shown, strict=True), strict=True))
        version = f"records of CSV, version 2, separated by {sorted(set(self._separators))}"
        self._index = FileIndex(files, version, lambda file: scan_records(file, *of[file], LOCATED * limit))
        super().__init__(self._index.upto)
        self.columns = [self._header(number) if self._index.extra[number] else [] for number in range(len(files))]
        """The names of the columns of each file."""

    def text(self, index: int) -> Document:
        """Return the document in record ``index``.

        Raises:
            CorruptRecord: it is too large, has another number of values than columns, is not UTF-8, or has no document.
        """
        number, place_in_file = self.locate(index)
        record = 1 + place_in_file
        place = self.place(index)
        columns = self.columns[number]
        values = _values(self._content(number, record), self._separators[number], place)
        if len(values) != len(columns):
            why = f"has {len(values)} values, but the header names {len(columns)} columns"
            raise CorruptRecord(place, why, "put values with separators or line ends between quotes")
        return self._read(dict(zip(columns, values, strict=True)), place)

    def name_of(self, file: int) -> Path:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self._shown[file]

    def number_of(self, file: int, document: int) -> int:
        """Return the number of the record after the header, from 1."""
        return document + 1

    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        (begin,) = self._index.values(number, 2 * (1 + first), 2 * (1 + first) + 1).tolist()
        (end,) = self._index.values(number, 2 * last + 1, 2 * last + 2).tolist()
        return [(self._files[number], begin, end)]

    def _header(self, file: int) -> list[str]:
        try:
            return header(self._content(file, 0), self._separators[file], self._shown[file])
        except CorruptRecord as error:
            raise UserError.one(error.place, error.why, error.fix) from None

    def _content(self, file: int, record: int) -> bytes:
        """Return the bytes of a record of a file; the first is the header.

        Raises:
            CorruptRecord: it is too large.
        """
        start, end = self._index.values(file, 2 * record, 2 * record + 2).tolist()
        if end - start > self._limit:
            raise too_large(f"{self._shown[file]}{self.mark}{record}", end - start, self._limit)
        return self._maps.content(self._files[file])[start:end]


def separator_of(file: Path) -> str:
    """Return what separates the values of ``file``."""
    return _SEPARATORS.get(plain_suffix(file), ",")


def header(content: bytes, separator: str, file: Path) -> list[str]:
    """Return the names of the columns.

    Raises:
        UserError: they are not UTF-8, or not all different; or another character separates them.
    """
    try:
        names = _values(content, separator, f"{file}, header")
    except CorruptRecord as error:
        raise UserError.one(error.place, error.why, error.fix) from None
    if len(names) == 1 and (other := next((one for one in ";\t,|" if one != separator and one in names[0]), None)):
        why = f"its header has one column, {names[0][:80]!r}: its values are separated by {other!r}, not by {separator!r}"
        raise UserError.one(str(file), why, "name it .tsv if tabs separate its values, or write it with commas")
    names = [name or f"Unnamed: {number}" for number, name in enumerate(names)]  # as pandas, which writes its index so
    if len(set(names)) != len(names):
        why = f"its header has equal names ({', '.join(map(repr, names))[:200]})"
        raise UserError.one(str(file), why, "give each column a name of its own in the first line")
    return names


def scan_records(
    file: Path, separator: str, shown: Path, longest: int, size: int = 0
) -> Generator[NDArray[numpy.int64], None, tuple[int, int]]:
    """Yield the first byte and the end byte of each record of ``file``, without its line end (LF, CR, or both); return the
    number of records without the header, and with it.

    Args:
        shown: the name of the file in errors.
        size: bytes that are read at a time; 0: many.

    Raises:
        UserError: a record takes more than ``longest`` bytes.
    """
    records = inside = 0
    before = _LF  # the last byte of the chunk before
    with open_file(file, buffering=0) as stream:
        begin = stream.read(len(_BOM))
        first = start = len(_BOM) if begin == _BOM else 0
        stream.seek(first)
        while content := stream.read(size or _CHUNK):
            chunk = numpy.frombuffer(content, numpy.uint8)
            quotes = _quotes(chunk, inside, before, ord(separator))
            ends = numpy.flatnonzero((chunk == _LF) | (chunk == _CR))
            ends = ends[(inside + numpy.searchsorted(quotes, ends)) % 2 == 0] + first
            bounds = _filled(start, ends)
            start = int(ends[-1]) + 1 if len(ends) else start
            inside = (inside + len(quotes)) % 2
            last = len(content) - 1
            before = 0 if chunk[-1] == _QUOTE and not (len(quotes) and quotes[-1] == last) else int(chunk[-1])
            first += len(content)
            records += len(bounds) // 2
            yield bounds
            if first - start > longest:
                raise endless(f"{shown}, record {records}", longest, "the record")
    rest = _filled(start, numpy.array([first]))
    yield rest
    records += len(rest) // 2
    return max(records - 1, 0), records


def _quotes(chunk: NDArray[numpy.uint8], inside: int, before: int, separator: int) -> NDArray[numpy.int64]:
    """Return where text between quotes begins or ends. Two quotes within it end it and begin it again; a quote within a
    value that does not begin with one is a character like others.

    Args:
        inside: whether the chunk begins between quotes.
        before: the byte before the chunk; 0 for such a character.
    """
    quotes = numpy.flatnonzero(chunk == _QUOTE)
    previous = numpy.where(quotes > 0, chunk[quotes - 1], before) if len(quotes) else quotes
    begins = numpy.isin(previous, (separator, _LF, _CR))
    if (begins | (previous == _QUOTE))[inside::2].all():
        return quotes
    kept: list[int] = []
    for place, begin, byte in zip(quotes.tolist(), begins.tolist(), previous.tolist(), strict=True):
        doubled = byte == _QUOTE and (place == 0 or (bool(kept) and kept[-1] == place - 1))
        if (inside + len(kept)) % 2 or begin or doubled:
            kept.append(place)
    return numpy.array(kept, numpy.int64)


def _filled(start: int, ends: NDArray[Any]) -> NDArray[numpy.int64]:
    """Return the first and the end byte of each record that is not empty, alternately.

    Args:
        start: first byte of the first record.
        ends: places of the line ends.
    """
    starts = numpy.concatenate([[start], ends[:-1] + 1])[: len(ends)]
    bounds = numpy.stack([starts, ends], axis=1).astype(numpy.int64)
    return bounds[bounds[:, 1] > bounds[:, 0]].reshape(-1)


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


def open_csv_files(context: DatasetContext[Any], read: Reader, field: str | None = None) -> DocumentSource:
    """Open the files at the dataset's path.

    Args:
        field: the only field that ``read`` needs, if it needs only one.

    Raises:
        UserError: a file cannot be read, contains no documents, or lacks the field.
    """
    files = find_files(context, ENDINGS["csv"])
    plain = decompressed(files, context.max_record_bytes)
    records = CsvRecords(plain, files, read, context.max_record_bytes)
    for file, columns in zip(files, records.columns, strict=True):
        if field is not None and columns and field not in columns:
            raise UserError.one(str(file), missing_field(field, columns), FIELD_FIX)
    if len(records) == 0:
        raise UserError.one(context.where, EMPTY, EMPTY_FIX)
    return ShuffledDocuments(records, context.seed, plain, context.shuffle)


def open_csv(context: DatasetContext[None]) -> DocumentSource:
    """Open CSV or TSV files.

    Raises:
        UserError: a file cannot be read, contains no documents, or lacks the text field.
    """
    return open_csv_files(context, reads_text(context), None if context.format is not None else context.text_field)


def check_csv(context: DatasetContext[None]) -> list[Problem]:
    """Check that the files exist, and that the header of each that is not compressed names the text field."""

    def check() -> list[Problem]:
        found = check_format(context)
        for file in find_files(context, ENDINGS["csv"]):
            if file.suffix not in (".csv", ".tsv") or context.format is not None:
                continue
            columns = _columns_of(file, context.max_record_bytes)
            if columns and context.text_field not in columns:
                found.append(Problem(str(file), missing_field(context.text_field, columns), FIELD_FIX))
        return found

    return problems(context, check)


def _columns_of(file: Path, limit: int) -> list[str]:
    """Return the names of the columns; none of an empty file.

    Raises:
        UserError: see :func:`header`.
    """
    separator = separator_of(file)
    found = scan_records(file, separator, file, limit, _FEW)
    begin, end = next((bounds[:2].tolist() for bounds in found if len(bounds)), (0, 0))
    with open_file(file) as stream:
        stream.seek(begin)
        return header(stream.read(end - begin), separator, file) if end else []
