"""Rows of files that store them in groups, column by column: Parquet (row groups), Arrow (record batches).

Where the groups are is found once (:mod:`titan_data.file_index`), from footers and headers. A document is read by decoding
the used columns of its group, or of a part of a group that is large; what was decoded last stays in memory, up to a number
of bytes for the process. So neighbours cost nothing, and a document at random its group.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy
import pyarrow
from numpy.typing import NDArray

from titan_core.api import CorruptRecord, Document, UserError
from titan_core.toolkit.text import show_bytes
from titan_data.arrow_values import Conversion, record_of
from titan_data.file_documents import FileDocuments
from titan_data.file_index import FileIndex
from titan_data.limits import DEFAULT, TOGETHER, TooLarge, too_large
from titan_data.records import Reader
from titan_data.row_files import Bounds, Form, RowFile, open_file, scan_groups, schema_mark, understood
from titan_data.row_sizes import largest_row, row_size
from titan_data.table_columns import Columns

LIMIT: Final = 512 << 20
"""Bytes of decoded rows and of footers that a process keeps."""
PART: Final = 8 << 20
"""Bytes of decoded rows that are kept together, if a group has more than twice as many."""
_PASSES: Final = 16
"""Large groups of a dataset whose decoding can be continued with the next part, instead of from the first row."""
_SAMPLED: Final = 16
"""Files whose decoded size stands for that of all."""
_numbers = itertools.count()


class _Damaged(Exception):
    """Rows cannot be decoded."""


class RowGroups(FileDocuments):
    """Rows fetched by index, as mappings from the names of columns to values."""

    mark = ", row "

    def __init__(
        self,
        files: Sequence[Path],
        shown: Sequence[Path],
        form: Form,
        columns: Columns,
        read: Reader,
        limit: int = DEFAULT,
    ) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.
            limit: bytes of a row.

        Raises:
            UserError: a file is damaged or encrypted, or lacks a column.
            OSError: a file cannot be read.
        """
        self._files, self._shown, self._form, self._read, self._limit = files, shown, form, read, limit
        self._index = FileIndex(files, form.version, scan_groups(form, dict(zip(files, shown, strict=True))))
        super().__init__(self._index.upto)
        self._number = next(_numbers)
        weakref.finalize(self, _decoded.forget, self._number)
        self._columns: dict[int, dict[str, Conversion]] = {}
        for mark, file in zip(*numpy.unique(self._index.extra, return_index=True), strict=True):  # files of one schema
            self._columns[int(mark)] = columns.of(self._opened(int(file)).schema, shown[file])
        self._passes: OrderedDict[tuple[int, int], _Pass] = OrderedDict()
        self._announced: set[tuple[int, int]] = set()

    def text(self, index: int) -> Document:
        """Return the document in row ``index``.

        Raises:
            CorruptRecord: its group is damaged, a value cannot be represented, it is not UTF-8, or it has no document.
            UserError: the file has changed since its groups were located.
        """
        file, row = self.locate(index)
        place = self.place(index)
        group = self._groups(file).of(row)
        try:
            table, first, largest = self._rows(file, group, row)
            found = table.slice(row - first, 1)
            if not self._form.verified:
                with understood(_Damaged):
                    found.validate(full=True)
            if largest > self._limit and (size := row_size(found)) > self._limit:
                raise too_large(place, size, self._limit, "the row")
            record = record_of(found, self._columns[int(self._index.extra[file])], place)
        except _Damaged as error:
            why = f"its group of rows ({group.first} to {group.last - 1}) cannot be read: {error}"
            raise CorruptRecord(place, why, "copy the file again") from None
        except TooLarge as error:
            raise too_large(place, error.size, self._limit, error.what, TOGETHER) from None
        except UnicodeDecodeError as error:
            why = f"not UTF-8 text: {error.reason} at byte {error.start}"
            raise CorruptRecord(place, why, "convert it to UTF-8") from None
        return self._read(record, place)

    def name_of(self, file: int) -> Path:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self._shown[file]

    def read_ahead(self, first: int, last: int) -> None:
        """Start reading the groups of rows ``first`` to ``last`` (exclusive) that have not been decoded."""
        while first < last:
            file, row = self.locate(first)
            group = self._groups(file).of(row)
            key = (file, group.number)
            if key not in self._announced and _decoded.get((self._number, *key, 0)) is None:
                self._announced.add(key)
                for path, begin, end in self.ranges(file, row, row + 1):
                    self._maps.read_ahead(path, begin, end)
            first += group.last - row

    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.file_documents.FileDocuments`: those of the used columns of whole groups."""
        opened, columns, groups = self._opened(number), self._columns_of(number), self._groups(number)
        found = []
        while first < last:
            group = groups.of(first)
            extents = opened.extents(group.number, group.bounds, columns)
            found += [(self._files[number], begin, end) for begin, end in extents]
            first = group.last
        return found

    def useful_bytes(self, index: int) -> int:
        """Return the bytes that row ``index`` takes in the file: the mean of its group."""
        file, row = self.locate(index)
        group = self._groups(file).of(row)
        size = sum(end - begin for _, begin, end in self.ranges(file, row, row + 1))
        return size // (group.last - group.first)

    def describe(self) -> list[str]:
        """Return what is in the files, and what a document at random costs, for ``titan data inspect``."""
        line = f"{len(self._files):,} files of {self._form.name}, {len(self):,} rows"
        if self._largest:
            named = ", ".join(map(repr, self._columns_of(0)))
            line += f"; of the columns that are read ({named}), a group has up to {show_bytes(self._largest)} in memory"
        return [line, *([advice] if (advice := self.advice) else [])]

    @property
    def advice(self) -> str | None:
        """What to do if a document at random costs its group, because not all groups fit into memory."""
        if (self.unpacked_bytes or 0) <= LIMIT:
            return None
        cost = f"half of its group of rows (up to {show_bytes(self._largest)})" if self._largest > 2 * PART else "its group"
        less = ", write smaller groups (row_group_size=1000), or tokenise the dataset" if self._largest > 2 * PART else ""
        return (
            f"its rows take more than the {show_bytes(LIMIT)} that a process keeps, so a document at random costs the "
            f'decoding of {cost}: set data.shuffle = "blocks"{less}'
        )

    @property
    def unpacked_bytes(self) -> int | None:
        """Bytes of all rows as they are decoded, about; ``None`` if they are parts of memory maps."""
        return self._sizes[0]

    @property
    def _largest(self) -> int:
        """Bytes of the largest group as it is decoded."""
        return self._sizes[1]

    @cached_property
    def _sizes(self) -> tuple[int | None, int]:
        largest = rows = size = 0
        for file in self._sample():
            opened, columns = self._opened(file), self._columns_of(file)
            if opened.mapped:
                return None, 0
            for group in self._groups(file):
                unpacked = opened.unpacked(group.number, group.bounds, columns)
                size, largest = size + unpacked, max(largest, unpacked)
            rows += self._index.documents(file)
        return (size * len(self) // rows if rows else 0), largest

    def _sample(self) -> list[int]:
        """Return the numbers of some files."""
        count = min(_SAMPLED, len(self._files))
        return sorted({number * (len(self._files) - 1) // max(count - 1, 1) for number in range(count)})

    def _rows(self, file: int, group: _Group, row: int) -> tuple[pyarrow.Table, int, float]:
        """Return decoded rows of a group, ``row`` among them, the number of the first of them, and the most bytes that one
        of them takes.

        Raises:
            _Damaged: they cannot be decoded.
            UserError: there are fewer.
            OSError: they cannot be read.
        """
        opened, columns = self._opened(file), self._columns_of(file)
        rows = group.last - group.first
        unpacked = opened.unpacked(group.number, group.bounds, columns)
        each = rows if unpacked <= 2 * PART or opened.mapped else max(1, rows * PART // unpacked)
        part = (row - group.first) // each
        first = group.first + part * each
        key = (self._number, file, group.number, part)
        table, largest = _decoded.get(key) or (None, math.inf)
        if table is None:
            self._announced.discard((file, group.number))
            with understood(_Damaged):
                table = self._decode(opened, file, group, columns, each, part)
            if table is None or table.num_rows != min(each, group.last - first):
                raise self._changed(file)
            if not opened.mapped:
                largest = largest_row(table)
                _decoded.put(key, (table, largest), table.nbytes)
        return table, first, largest

    def _decode(
        self, opened: RowFile, file: int, group: _Group, columns: Sequence[str], each: int, part: int
    ) -> pyarrow.Table | None:
        """Return part ``part`` of a group in parts of ``each`` rows."""
        here = self._passes.pop((file, group.number), None)
        if here is None or here.next > part:
            content = self._maps.content(self._files[file])
            tables = opened.tables(content, group.number, group.bounds, columns, each, TOGETHER * self._limit)
            here = _Pass(_parts(tables, each, 2 * TOGETHER * self._limit))
        table = None
        while here.next <= part:
            table = next(here.parts, None)
            here.next += 1
        if each < group.last - group.first:
            self._passes[file, group.number] = here
            if len(self._passes) > _PASSES:
                self._passes.popitem(last=False)
        return table

    def _groups(self, file: int) -> _Groups:
        return _Groups(self._index.values(file).reshape(-1, 3))

    def _columns_of(self, file: int) -> list[str]:
        return list(self._columns[int(self._index.extra[file])])

    def _opened(self, file: int) -> RowFile:
        """
        Raises:
            UserError: the file has changed since its groups were located.
            OSError: it cannot be read.
        """
        key = (self._number, file)
        opened: RowFile | None = _decoded.get(key)
        if opened is None:
            opened = open_file(self._form, self._maps.content(self._files[file]), self._shown[file])
            if schema_mark(opened.schema) != self._index.extra[file]:
                raise self._changed(file)
            _decoded.put(key, opened, opened.held)
        return opened

    def _changed(self, file: int) -> UserError:
        why = "has changed since its rows were located, when the job started, or is damaged"
        return UserError.one(str(self._shown[file]), why, "restart the job, and do not write to the files of a running one")


@dataclass(frozen=True)
class _Group:
    number: int
    first: int
    last: int
    """Exclusive, as the first a row of the file."""
    bounds: Bounds


class _Groups:
    """The groups of a file."""

    def __init__(self, values: NDArray[numpy.int64]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[_Group]:
        return (self._at(number) for number in range(len(self._values)))

    def of(self, row: int) -> _Group:
        """Return the group that contains ``row``."""
        return self._at(int(numpy.searchsorted(self._values[:, 0], row, "right")))

    def _at(self, number: int) -> _Group:
        last, begin, end = self._values[number].tolist()
        return _Group(number, int(self._values[number - 1, 0]) if number else 0, last, (begin, end))


@dataclass
class _Pass:
    """A group that is decoded part by part."""

    parts: Iterator[pyarrow.Table]
    next: int = 0


class _Decoded:
    """What this process has decoded last, of all datasets. Keys begin with the number of the dataset."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, ...], tuple[Any, int]] = OrderedDict()
        self._lock = threading.RLock()  # reentrant, because a garbage collection may call forget() anywhere
        self.bytes = 0

    def get(self, key: tuple[int, ...]) -> Any:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: tuple[int, ...], value: Any, size: int) -> None:
        """Keep ``value``, and drop what was used least recently: all but ``value`` if it is as large as :data:`LIMIT`."""
        with self._lock:
            self._kept[key] = value, size
            self.bytes += size
            while self.bytes > LIMIT and len(self._kept) > 1:
                _, (_, freed) = self._kept.popitem(last=False)
                self.bytes -= freed

    def forget(self, number: int) -> None:
        with self._lock:
            for key in [key for key in self._kept if key[0] == number]:
                self.bytes -= self._kept.pop(key)[1]


_decoded = _Decoded()


def _parts(tables: Iterator[pyarrow.Table], rows: int, most: int) -> Iterator[pyarrow.Table]:
    """Yield the rows of ``tables`` in tables of ``rows`` rows; the last may have fewer.

    Raises:
        TooLarge: a table takes more than ``most`` bytes.
    """
    held: list[pyarrow.Table] = []
    for table in tables:
        held.append(table)
        if (size := sum(one.nbytes for one in held)) > most and len(held) > 1:
            raise TooLarge(f"a part of {rows} rows", size)
        while sum(map(len, held)) >= rows:
            joined = pyarrow.concat_tables(held)
            yield joined.slice(0, rows)
            held = [joined.slice(rows)] if len(joined) > rows else []
    if held:
        yield pyarrow.concat_tables(held)
