"""Parquet files as :mod:`titan_data.row_groups` reads them: a footer, and the column chunks of one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow
import pyarrow.parquet

from titan_data.remote_bytes import BLOCK, RemoteBytes
from titan_data.row_groups import Bounds, Form, GroupTable
from titan_data.seekable import seekable

_PER_FOOTER: Final = 8
"""Bytes of memory for a byte of a footer, about."""


class ParquetFile:
    """The footer of a file; see :class:`~titan_data.row_groups.RowFile`."""

    mapped = False

    def __init__(self, content: Any) -> None:
        """
        Raises:
            pyarrow.ArrowException, OSError: it is no Parquet file, or damaged or encrypted.
        """
        reader = pyarrow.parquet.ParquetFile(seekable(content))
        self._metadata, self.schema = reader.metadata, reader.schema_arrow
        self.held = self._metadata.serialized_size * _PER_FOOTER
        leaves = (self._metadata.schema.column(number).path for number in range(self._metadata.num_columns))
        self._columns = [_column_of(path, self.schema.names) for path in leaves]

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
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                begin = min(begin, chunk.dictionary_page_offset)
            end = begin + chunk.total_compressed_size
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
        return found

    def unpacked(self, group: int, bounds: Bounds, columns: Sequence[str]) -> int:
        """Return the size of the columns' pages before compression."""
        return sum(chunk.total_uncompressed_size for chunk in self._chunks(group, columns))

    def tables(self, content: Any, group: int, bounds: Bounds, columns: Sequence[str], rows: int) -> Iterator[pyarrow.Table]:
        """Yield the columns of a row group."""
        whole = rows >= self._metadata.row_group(group).num_rows
        reader = pyarrow.parquet.ParquetFile(
            seekable(content),
            metadata=self._metadata,
            pre_buffer=False,
            # One request for each column chunk, unless only a part of it is kept.
            buffer_size=BLOCK if isinstance(content, RemoteBytes) and not whole else 0,
            page_checksum_verification=True,
        )
        batches = reader.iter_batches(rows, [group], list(columns), use_threads=False)
        yield from (pyarrow.Table.from_batches([batch]).select(list(columns)) for batch in batches)

    def _chunks(self, group: int, columns: Sequence[str]) -> Iterator[Any]:
        about = self._metadata.row_group(group)
        return (about.column(number) for number, name in enumerate(self._columns) if name in columns)


def _column_of(path: str, names: Sequence[str]) -> str:
    """Return which of ``names``, which may contain dots, the path of a nested column begins with."""
    return max((name for name in names if f"{path}.".startswith(f"{name}.")), key=len, default="")


PARQUET: Final = Form("Parquet", "row groups of Parquet, version 2", ParquetFile, verified=True)
