"""Parquet files as :mod:`titan_data.row_groups` reads them: a footer, and the column chunks of one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow
import pyarrow.parquet

from titan_data.limits import TooLarge
from titan_data.parquet_pages import DELTA_BYTE_ARRAY, IN_DICTIONARY, longest_text, pages
from titan_data.remote_bytes import BLOCK, RemoteBytes
from titan_data.row_files import Bounds, Form, GroupTable
from titan_data.row_sizes import row_size
from titan_data.seekable import FetchedRanges, seekable

_AMPLIFIED: Final = 64
"""Times that the values in lists may be larger than their pages, if they are many."""
_NUMBER: Final = 8
"""The most bytes of a value that is no text."""
_PER_FOOTER: Final = 8
"""Bytes of memory for a byte of a footer, about."""


class ParquetFile:
    """The footer of a file; see :class:`~titan_data.row_files.RowFile`."""

    mapped = False

    def __init__(self, content: Any) -> None:
        """
        Raises:
            pyarrow.ArrowException, OSError: it is no Parquet file, or damaged or encrypted.
        """
        reader = pyarrow.parquet.ParquetFile(seekable(content))
        self._metadata, self.schema = reader.metadata, reader.schema_arrow
        self.held = self._metadata.serialized_size * _PER_FOOTER
        leaves = [self._metadata.schema.column(number).path for number in range(self._metadata.num_columns)]
        self._columns = [_column_of(path, self.schema.names) for path in leaves]
        self._expansions: dict[tuple[int, int], _Expansion] = {}
        """Of row groups and leaves that have been read: a walk over a remote chunk's pages costs requests."""

    def groups(self, content: Any) -> GroupTable:
        """Return the row groups, after a check of what the footer says of each column.

        Raises:
            pyarrow.ArrowException, OSError: it is damaged, or columns are encrypted.
        """
        reader = pyarrow.parquet.ParquetFile(seekable(content), metadata=self._metadata, buffer_size=1, pre_buffer=False)
        every = list(range(self._metadata.num_columns))
        found, rows = [], 0
        for number in range(self._metadata.num_row_groups):
            # Reads nothing, for no row is asked for. RowGroupMetaData.column() aborts the process where this raises.
            for _ in reader.reader.iter_batches(0, [number], column_indices=every, use_threads=False):
                pass
            rows += self._metadata.row_group(number).num_rows
            extents = self.extents(number, (0, 0), self.schema.names)
            found.append(
                (rows, min((begin for begin, _ in extents), default=0), max((end for _, end in extents), default=0))
            )
        return found

    def extents(self, group: int, bounds: Bounds, columns: Sequence[str]) -> list[Bounds]:
        """Return the column chunks, one after another where they are neighbours."""
        found: list[Bounds] = []
        for chunk in self._chunks(group, columns):
            begin, end = _extent(chunk)
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
        return found

    def unpacked(self, group: int, bounds: Bounds, columns: Sequence[str]) -> int:
        """Return the size of the columns' pages before compression."""
        return sum(chunk.total_uncompressed_size for chunk in self._chunks(group, columns))

    def tables(
        self, content: Any, group: int, bounds: Bounds, columns: Sequence[str], rows: int, most: int
    ) -> Iterator[pyarrow.Table]:
        """Yield the columns of a row group."""
        number = self._metadata.row_group(group).num_rows
        remote, whole = isinstance(content, RemoteBytes), rows >= number
        if remote:  # one request for each column chunk, unless only a part of it is kept
            content = FetchedRanges(content, self.extents(group, bounds, columns) if whole else ())
        chunks = []
        for column in self._numbers(columns):
            if (chunk := self._expansions.get((group, column))) is None:
                chunk = self._expansions[group, column] = self._expansion(content, group, column, most)
            if chunk.refused:
                raise TooLarge(*chunk.refused)
            chunks.append(chunk)
        rows = max(1, min([rows, *(chunk.rows(number, most) for chunk in chunks)]))
        reader = pyarrow.parquet.ParquetFile(
            seekable(content),
            metadata=self._metadata,
            pre_buffer=False,
            buffer_size=BLOCK if remote and not whole else 0,
            page_checksum_verification=True,
            read_dictionary=[chunk.path for chunk in chunks if chunk.as_dictionary],
        )
        for batch in reader.iter_batches(rows, [group], list(columns), use_threads=False):
            if batch.nbytes > 2 * most:
                raise TooLarge(f"a part of row group {group}", batch.nbytes)
            table = pyarrow.Table.from_batches([batch]).select(list(columns))
            yield _plain(table) if any(chunk.as_dictionary for chunk in chunks) and row_size(table) <= most else table

    def _expansion(self, content: Any, group: int, column: int, most: int) -> _Expansion:
        """Return how large a column chunk becomes, from the headers of its pages.

        Raises:
            pyarrow.ArrowException, OSError: a header, or the dictionary, is damaged.
        """
        chunk, about = self._metadata.row_group(group).column(column), self._metadata.schema.column(column)
        path, dictionary = chunk.path_in_schema, None
        packed = values = in_dictionary = others = width = 0
        delta = False
        for page in pages(content, *_extent(chunk)):
            if page.unpacked > most:
                return _Expansion(path, refused=(f"a page of column {path}", page.unpacked))
            packed += page.unpacked
            if page.is_dictionary:
                dictionary = page
                continue
            values += page.values
            if page.encoding in IN_DICTIONARY:
                in_dictionary += page.values
            else:
                delta = delta or page.encoding == DELTA_BYTE_ARRAY
                each = 1 if page.encoding == DELTA_BYTE_ARRAY else max(page.values, 1)
                width, others = max(width, -(-page.unpacked // each)), others + page.unpacked * page.values // each
        texts, entry = about.physical_type == "BYTE_ARRAY", 0
        if texts and dictionary is not None:
            entry = dictionary.unpacked
            if entry * in_dictionary > most:
                entry = longest_text(content, dictionary, chunk.compression)
        as_dictionary = not delta and entry * in_dictionary > most
        entry = 0 if as_dictionary else entry
        size = values * max(about.length, _NUMBER) + (in_dictionary * entry + others if texts else 0)
        nested = about.max_repetition_level > 0 and not (texts and delta)
        if nested and size > 2 * most and size > _AMPLIFIED * packed:
            return _Expansion(path, refused=(f"column {path}, whose {values:,} values are nearly all equal,", size))
        return _Expansion(path, as_dictionary, max(about.length, _NUMBER, entry, width if texts else 0), size, nested)

    def _chunks(self, group: int, columns: Sequence[str]) -> Iterator[Any]:
        about = self._metadata.row_group(group)
        return (about.column(number) for number in self._numbers(columns))

    def _numbers(self, columns: Sequence[str]) -> list[int]:
        """Return the numbers of the leaves of ``columns``."""
        return [number for number, name in enumerate(self._columns) if name in columns]


@dataclass(frozen=True)
class _Expansion:
    """How large a column chunk becomes when it is decoded."""

    path: str
    as_dictionary: bool = False
    """Whether its texts stay what they are in the file, each once and a number for each value, because they are too many."""
    width: int = _NUMBER
    """The most bytes of a value; of values that are in no dictionary, their mean in the page where it is largest."""
    size: int = 0
    """The most bytes of all values."""
    in_lists: bool = False
    """Whether a row may have many values."""
    refused: tuple[str, int] | None = None
    """What takes more memory than it may, and how much."""

    def rows(self, number: int, most: int) -> int:
        """Return how many of ``number`` rows may be decoded at once."""
        if self.size <= most:
            return number
        return number * most // (4 * self.size) if self.in_lists else most // (4 * self.width)


def _plain(table: pyarrow.Table) -> pyarrow.Table:
    """Return the table with each value of a column in its place, not as a number of a dictionary's."""
    for number, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(field.type.value_type))
    return table


def _extent(chunk: Any) -> Bounds:
    begin = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        begin = min(begin, chunk.dictionary_page_offset)
    return begin, begin + chunk.total_compressed_size


def _column_of(path: str, names: Sequence[str]) -> str:
    """Return which of ``names``, which may contain dots, the path of a nested column begins with."""
    return max((name for name in names if f"{path}.".startswith(f"{name}.")), key=len, default="")


PARQUET: Final = Form("Parquet", "row groups of Parquet, version 2", ParquetFile, verified=True)
