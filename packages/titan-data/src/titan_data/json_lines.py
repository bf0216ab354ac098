"""Local JSON lines, one document per line, fetched through an index of line starts (:mod:`titan_data.file_index`)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import Document, UserError
from titan_core.toolkit.files import open_file
from titan_data.file_documents import FileDocuments
from titan_data.file_index import FileIndex
from titan_data.limits import DEFAULT, LOCATED, endless, too_large
from titan_data.local_files import begins_lines
from titan_data.records import Reader, parsed_record

_CHUNK: Final = 1 << 24
_WHITESPACE = numpy.frombuffer(b" \t\n\r\x0b\x0c", numpy.uint8)
"""What :meth:`bytes.strip` removes."""
_NEWLINE: Final = ord("\n")
_NO_LINES: Final = -1
"""Instead of the number of blank lines: the file has no lines, but an array or indented objects."""


class JsonRecords(FileDocuments):
    """Records fetched by index. Blank lines are skipped."""

    mark = ":"

    def __init__(self, files: Sequence[Path], shown: Sequence[Path], read: Reader, limit: int = DEFAULT) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.
            limit: bytes of a line.

        Raises:
            UserError: a line does not end.
        """
        self._files, self._shown, self._read, self._limit = files, shown, read, limit
        names = dict(zip(files, shown, strict=True))
        self._index = FileIndex(files, "lines of JSON, version 1", lambda file: _scan(file, names[file], LOCATED * limit))
        super().__init__(self._index.upto)

    @property
    def are_lines(self) -> bool:
        """Whether each file contains one record per line, not one array or indented objects."""
        return not (self._index.extra == _NO_LINES).any()

    def text(self, index: int) -> Document:
        """Return the document in record ``index``.

        Raises:
            CorruptRecord: the line is too long, or not a JSON object with a document.
            UserError: the file has changed since its lines were located.
        """
        file, record = self.locate(index)
        content = self._maps.content(self._files[file])
        start, end = self._bounds(file, record, record + 1)
        if end - start > self._limit:
            raise too_large(f"{self._shown[file]}:{self.number_of(file, record)}", end - start, self._limit, "the line")
        read = content[start:end]
        ended = end == len(content) or read.endswith(b"\n")
        if start >= len(content) or not ended or (end == len(content) and start and content[start - 1] != _NEWLINE):
            why = "has changed since its lines were located, when the job started"
            raise UserError.one(
                str(self._shown[file]), why, "restart the job, and do not write to the files of a running one"
            )
        place = f"{self._shown[file]}:{self.number_of(file, record)}"
        return self._read(parsed_record(read.partition(b"\n")[0], place), place)

    def name_of(self, file: int) -> Path:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self._shown[file]

    def number_of(self, file: int, document: int) -> int:
        """Return the number of the record's line."""
        return document + 1 + self._blank_before(file, document)

    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return [(self._files[number], *self._bounds(number, first, last))]

    def _bounds(self, file: int, first: int, last: int) -> tuple[int, int]:
        """Return the first byte of record ``first``, and that of record ``last``, or of the file's end."""
        begin = int(self._index.values(file, first, first + 1)[0])
        if last < self._index.documents(file):
            return begin, int(self._index.values(file, last, last + 1)[0])
        return begin, len(self._maps.content(self._files[file]))

    def _blank_before(self, file: int, record: int) -> int:
        """Return the number of blank lines before a record."""
        if not self._index.extra[file]:
            return 0
        return int(numpy.searchsorted(self._index.values(file, self._index.documents(file)), record, "right"))


def _scan(file: Path, shown: Path, longest: int) -> Generator[NDArray[numpy.int64], None, tuple[int, int]]:
    """Yield the first byte of each line of ``file`` that is not blank, and then, for each blank line, the number of those
    before it. Return the numbers of both; see :data:`_NO_LINES`.

    Raises:
        UserError: a line is longer than ``longest``, unless it is the first of a file without lines.
    """
    blank: list[NDArray[Any]] = []
    records = first = 0
    with open_file(file, buffering=0) as stream:
        rest = b""
        while True:
            read = stream.read(_CHUNK)
            cut = read.rfind(b"\n") + 1
            if read and not cut:  # a line that is longer
                rest += read
                if len(rest) > longest and (records or begins_lines(rest[:_CHUNK])):
                    lines_before = records + sum(map(len, blank))
                    raise endless(f"{shown}:{lines_before + 1}", longest, "the line")
                if len(rest) > longest:
                    return 0, _NO_LINES
                continue
            lines, rest = (rest + read[:cut] if rest else read[:cut]), read[cut:]
            if not read:  # the last line may lack its end
                lines, rest = lines + rest, b""
            starts, ends = _lines_of(lines)
            filled = _filled(lines, starts, ends)
            if not records and filled.any():
                line = int(filled.argmax())
                if not begins_lines(lines[starts[line] : ends[line]]):
                    return 0, _NO_LINES
            blank.append(records + numpy.cumsum(filled, dtype=numpy.int64)[~filled])
            records += int(filled.sum())
            yield starts[filled] + first
            first += len(lines)
            if not read:
                break
    blanks = numpy.concatenate(blank)
    yield blanks.astype(numpy.int64)
    return records, len(blanks)


def _lines_of(content: bytes) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Return the first and end bytes of all lines. The last need not end with a line break."""
    ends = numpy.flatnonzero(numpy.frombuffer(content, numpy.uint8) == _NEWLINE).astype(numpy.int64)
    if content and not content.endswith(b"\n"):
        ends = numpy.append(ends, len(content))
    return numpy.concatenate([[0], ends[:-1] + 1])[: len(ends)].astype(numpy.int64), ends


def _filled(content: bytes, starts: NDArray[numpy.int64], ends: NDArray[numpy.int64]) -> NDArray[numpy.bool_]:
    """Return which lines are not blank."""
    filled = ends > starts
    # Only a line that begins with whitespace can be blank. There are few of them: check their contents.
    candidates = numpy.flatnonzero(filled)
    firsts = numpy.frombuffer(content, numpy.uint8)[starts[candidates]]
    for line in candidates[numpy.isin(firsts, _WHITESPACE)]:
        filled[line] = bool(content[starts[line] : ends[line]].strip())
    return filled
