"""Arrow files and streams (Feather version 2, ``Dataset.save_to_disk``) as :mod:`titan_data.row_groups` reads them.

A file is a stream of messages between a magic number and a footer. How many rows a record batch has is not in the footer
but in the batch's message, in a few bytes of metadata (a flatbuffer, https://arrow.apache.org/docs/format/Columnar.html),
with which the library would read the batch itself. These few bytes are therefore read here, and batches by the library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

import pyarrow
import pyarrow.ipc

from titan_data.limits import TooLarge
from titan_data.remote_bytes import RemoteBytes
from titan_data.row_files import Bounds, Form, GroupTable
from titan_data.seekable import seekable

_MAGIC: Final = b"ARROW1"
_START: Final = 8
"""First byte of the messages of a file; those of a stream begin with its first."""
_CONTINUES: Final = b"\xff\xff\xff\xff"
"""Begins a message since version 0.15 of the format."""
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


class ArrowFile:
    """The schema of a file or stream; see :class:`~titan_data.row_files.RowFile`."""

    def __init__(self, content: Any) -> None:
        """
        Raises:
            pyarrow.ArrowException, OSError: it is no Arrow file or stream, or damaged.
        """
        self._is_file = content[: len(_MAGIC)] == _MAGIC
        begin = _START if self._is_file else 0
        schema = _message(content, begin)
        if schema is None or schema.kind != _SCHEMA:
            raise pyarrow.ArrowInvalid("it does not begin with a schema")
        self.schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(content[begin : schema.end]))
        self.held, self._first = 4 * schema.end, schema.end
        self._dictionary_bytes: int | None = None
        messages = [message for _, message in _messages(content, self._first, _BATCH)]
        self._has_dictionaries = any(message.kind == _DICTIONARY for message in messages)
        plain = not messages or messages[-1].kind != _BATCH or not messages[-1].compressed
        self.mapped = plain and not isinstance(content, RemoteBytes) and (self._is_file or not self._has_dictionaries)

    def groups(self, content: Any) -> GroupTable:
        """Return the record batches."""
        found, rows = [], 0
        for at, message in _messages(content, self._first):
            if message.kind == _BATCH:
                rows += message.rows
                found.append((rows, at, message.end))
        return found

    def extents(self, group: int, bounds: Bounds, columns: Sequence[str]) -> list[Bounds]:
        """Return the bounds of the record batch."""
        return [bounds]

    def unpacked(self, group: int, bounds: Bounds, columns: Sequence[str]) -> int:
        """Return the size of the record batch in the file."""
        return bounds[1] - bounds[0]

    def tables(
        self, content: Any, group: int, bounds: Bounds, columns: Sequence[str], rows: int, most: int
    ) -> Iterator[pyarrow.Table]:
        """Yield the columns of a record batch, as a whole: a batch cannot be read in parts."""
        message = _message(content, bounds[0])
        if (size := self._dictionaries(content) + (message.unpacked(content) if message is not None else 0)) > most:
            raise TooLarge("its record batch, with the dictionaries of the file,", size)
        if self._is_file:
            fields = [self.schema.names.index(name) for name in columns]
            options = pyarrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            batch = pyarrow.ipc.open_file(seekable(content), options=options).get_batch(group)
        elif self._has_dictionaries:  # all that precede the batch: later ones replace earlier ones, or add to them
            begin, _ = bounds
            before = takewhile(lambda found: found[0] < begin, _messages(content, self._first))
            dictionaries = [(at, message.end) for at, message in before if message.kind == _DICTIONARY]
            parts = [bytes(content[first:last]) for first, last in [(0, self._first), *dictionaries, bounds]]
            batch = pyarrow.ipc.open_stream(b"".join(parts)).read_next_batch()
        else:
            begin, end = bounds
            part = memoryview(content[begin:end]) if isinstance(content, RemoteBytes) else memoryview(content)[begin:end]
            batch = pyarrow.ipc.read_record_batch(pyarrow.py_buffer(part), self.schema)
        yield pyarrow.Table.from_batches([batch]).select(list(columns))

    def _dictionaries(self, content: Any) -> int:
        """Return the bytes of the compressed dictionaries, which are decompressed with each record batch."""
        if self._dictionary_bytes is None:
            named = any("dictionary<" in str(field.type) for field in self.schema)
            messages = _messages(content, self._first) if named else ()
            self._dictionary_bytes = sum(one.unpacked(content) for _, one in messages if one.kind == _DICTIONARY)
        return self._dictionary_bytes


class _Message(NamedTuple):
    kind: int
    end: int
    """The byte after it."""
    rows: int
    compressed: bool
    buffers: tuple[tuple[int, int], ...] = ()
    """The first bytes and the sizes of compressed buffers."""

    def unpacked(self, content: Any) -> int:
        """Return the bytes of the buffers, decompressed. Each begins with their number, or -1 if it is not compressed."""
        sizes = ((int.from_bytes(content[at : at + 8], "little", signed=True), size) for at, size in self.buffers)
        return sum(size if unpacked == -1 else max(unpacked, 0) for unpacked, size in sizes)


def _messages(content: Any, at: int, upto: int | None = None) -> Iterator[tuple[int, _Message]]:
    """Yield the messages from byte ``at`` on, each with its first byte, up to and with the first of kind ``upto``."""
    while (message := _message(content, at)) is not None:
        yield at, message
        if message.kind == upto:
            return
        at = message.end


def _message(content: Any, at: int) -> _Message | None:
    """Return the message that begins at byte ``at``; ``None`` at the end of the messages.

    Raises:
        pyarrow.ArrowInvalid: there is none.
    """
    head = content[at : at + 8]
    if not head:
        return None  # a stream may end without a mark
    prefix = 8 if head[:4] == _CONTINUES else 4
    try:
        (size,) = struct.unpack_from("<i", head, prefix - 4)
        if size == 0:
            return None
        metadata = content[at + prefix : at + prefix + max(size, 0)]
        message = _Table(metadata, struct.unpack_from("<I", metadata)[0])
        kind, body, header = message.number(1, "<B"), message.number(3, "<q"), message.table(2)
        batch = header if kind == _BATCH else header.table(1) if kind == _DICTIONARY else None
        rows = batch.number(0, "<q") if batch is not None else 0
        compressed = batch is not None and batch.at(3) is not None
        begin = at + prefix + size
        pairs = batch.pairs(2) if batch is not None and compressed else ()
        buffers = tuple((begin + first, length) for first, length in pairs if length)
    except struct.error:
        raise pyarrow.ArrowInvalid(f"there is no whole message at byte {at}") from None
    end = at + prefix + size + body
    if min(body, rows) < 0 or end > len(content):
        raise pyarrow.ArrowInvalid(f"the message at byte {at} ends at byte {end}, but the file at byte {len(content)}")
    return _Message(kind, end, rows if kind == _BATCH else 0, compressed, buffers)


class _Table:
    """A table of a flatbuffer: fields by number, each of which may be absent. Whatever is outside of the buffer raises a
    ``struct.error``."""

    def __init__(self, buffer: bytes, at: int) -> None:
        self._buffer, self._at = buffer, at
        self._offsets = at - self._unpack("<i", at)

    def at(self, field: int) -> int | None:
        """Return where a field is."""
        place = 4 + 2 * field
        if place >= self._unpack("<H", self._offsets):
            return None
        offset = self._unpack("<H", self._offsets + place)
        return self._at + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """Return a number; 0 if it is absent."""
        at = self.at(field)
        return 0 if at is None else self._unpack(form, at)

    def table(self, field: int) -> _Table:
        """Return a table within this one."""
        at = self.at(field)
        if at is None:
            raise struct.error
        return _Table(self._buffer, at + self._unpack("<I", at))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """Return a vector of structs of two 64-bit numbers."""
        at = self.at(field)
        if at is None:
            return []
        begin = at + self._unpack("<I", at)
        count = self._unpack("<I", begin)
        if begin + 4 + 16 * count > len(self._buffer):
            raise struct.error
        return list(struct.iter_unpack("<qq", self._buffer[begin + 4 : begin + 4 + 16 * count]))

    def _unpack(self, form: str, at: int) -> int:
        if at < 0:
            raise struct.error
        return int(struct.unpack_from(form, self._buffer, at)[0])


ARROW: Final = Form("Arrow", "record batches of Arrow, version 2", ArrowFile, verified=False)
