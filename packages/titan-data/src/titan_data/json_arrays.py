"""JSON files with an array of records, or with records of several lines, fetched through an index of where records begin
and end (:mod:`titan_data.file_index`)."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

import numpy
from numpy.typing import NDArray

from titan_core.api import CorruptRecord, Document, UserError
from titan_core.toolkit.files import open_file
from titan_core.toolkit.plain_json import number_flaw, parse_json
from titan_data.file_documents import FileDocuments
from titan_data.file_index import FileIndex
from titan_data.limits import DEFAULT, LOCATED, endless, too_large
from titan_data.records import Reader

_CHUNK: Final = 1 << 20
_BETWEEN: Final = " \t\r\n"
_ENCLOSING: Final = '"[{'
_OPENING, _CLOSING = ([ord(bracket) for bracket in brackets] for brackets in ("[{", "]}"))
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_AT_ONCE: Final = 4096
"""Records whose bounds are yielded together."""


class JsonArrays(FileDocuments):
    """Records fetched by index."""

    mark = ", record "

    def __init__(self, files: Sequence[Path], shown: Sequence[Path], read: Reader, limit: int = DEFAULT) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.
            limit: bytes of a record.

        Raises:
            UserError: a file is not JSON, or a record does not end.
        """
        self._files, self._shown, self._read, self._limit = files, shown, read, limit
        names = dict(zip(files, shown, strict=True))
        self._index = FileIndex(files, "records of JSON arrays, version 1", lambda file: _scan(file, names[file], limit))
        super().__init__(self._index.upto)

    def text(self, index: int) -> Document:
        """Return the document in record ``index``.

        Raises:
            CorruptRecord: it is too large, or has no document, or the file has changed since its records were located.
        """
        number, record = self.locate(index)
        ((file, begin, end),) = self.ranges(number, record, record + 1)
        place = self.place(index)
        if end - begin > self._limit:
            raise too_large(place, end - begin, self._limit)
        try:
            found = parse_json(self._maps.content(file)[begin:end])
        except ValueError as error:
            raise CorruptRecord(place, f"not a JSON record: {error}", "restart the job if the file has changed") from None
        return self._read(found, place)

    def name_of(self, file: int) -> Path:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self._shown[file]

    def number_of(self, file: int, document: int) -> int:
        """Return the number of the record, from 1."""
        return document + 1

    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        bounds = self._index.values(number, 2 * first, 2 * last)
        return [(self._files[number], int(bounds[0]), int(bounds[-1]))]


def _scan(file: Path, shown: Path, limit: int) -> Generator[NDArray[numpy.int64], None, tuple[int, int]]:
    """Yield the first byte and the byte after the last of each record, alternately; return the number of records.

    Raises:
        UserError: the file is not JSON, or a record does not end.
    """
    text = _Text(file, shown, limit)
    bounds: list[int] = []
    records = 0
    in_array = text.skip("[")
    while True:
        if in_array and text.skip("]"):
            in_array = False
        if not in_array and text.ended():
            break
        bounds += text.value()
        records += 1
        if in_array and not text.skip(",") and not text.next_is("]"):
            raise text.wrong("records of an array must be separated by commas")
        if len(bounds) >= 2 * _AT_ONCE:
            yield numpy.array(bounds, numpy.int64)
            bounds = []
    yield numpy.array(bounds, numpy.int64)
    return records, 0


class _Text:
    """A file that is read from its first character to its last, of which no more is held than the current record needs."""

    def __init__(self, file: Path, shown: Path, limit: int) -> None:
        self._limit = limit
        self._shown, self._stream = shown, open_file(file)
        self._decoder, self._json = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder()
        self._held, self._place, self._bytes = "", 0, 0
        self._complete = False
        self._more(_CHUNK)

    def skip(self, character: str) -> bool:
        """Skip blanks and ``character``; return whether it was there."""
        found = self.next_is(character)
        if found:
            self._advance(self._place + 1)
        return found

    def next_is(self, character: str) -> bool:
        """Skip blanks; return whether ``character`` follows."""
        return not self.ended() and self._held[self._place] == character

    def ended(self) -> bool:
        """Skip blanks; return whether nothing follows."""
        while True:
            place = self._place
            while place < len(self._held) and self._held[place] in _BETWEEN:
                place += 1
            self._advance(place)
            if place < len(self._held) or self._complete:
                return place == len(self._held)
            self._more(_CHUNK)

    def value(self) -> tuple[int, int]:
        """Skip a JSON value; return its first byte, and the byte after its last.

        Raises:
            UserError: there is none.
        """
        self.ended()
        begin = self._bytes
        while True:
            why = ""
            try:
                _, end = self._json.raw_decode(self._held, self._place)
            except RecursionError:
                raise self.wrong("its lists and objects are nested too deeply", begin) from None
            except ValueError as error:
                end, why = len(self._held), number_flaw(error)
                if self._complete:
                    raise self.wrong(why, begin) from None
            held = len(self._held) - self._place
            if end < len(self._held) or self._complete:
                self._advance(end)
            elif held <= self._limit:
                self._more(min(max(_CHUNK, held), self._limit + 1 - held))  # parsed again, with twice as much
                continue
            else:
                self._skip_unparsed()
                if why and self._bytes - begin <= self._limit:
                    raise self.wrong(why, begin)
            return begin, self._bytes

    def _skip_unparsed(self) -> None:
        """Skip a value that is too large to be parsed, by its quotes and brackets.

        Raises:
            UserError: it does not end.
        """
        begin, longest = self._bytes, LOCATED * self._limit
        quotes = depth = 0
        while self._bytes - begin <= longest and (quotes or depth or self._held[self._place] in _ENCLOSING):
            text = _ESCAPED.sub("__", self._held[self._place : self._place + _CHUNK]).removesuffix("\\")
            characters = numpy.frombuffer(text.encode("utf-32-le"), numpy.uint32)
            inside = (quotes + numpy.cumsum(characters == ord('"'))) % 2
            steps = numpy.isin(characters, _OPENING).astype(int) - numpy.isin(characters, _CLOSING)
            depths = depth + numpy.cumsum(steps * (inside == 0))
            ends = numpy.flatnonzero((inside == 0) & (depths == 0))
            if len(ends):
                self._advance(self._place + int(ends[0]) + 1)
                return
            if text:
                quotes, depth = int(inside[-1]), int(depths[-1])
                self._advance(self._place + len(text))
            elif self._complete:
                raise self.wrong("the record does not end", begin)
            else:
                self._more(_CHUNK)
        most = longest if self._bytes - begin > longest else self._limit
        raise endless(f"{self._shown}, byte {begin}", most, "the record")

    def wrong(self, why: str, at: int | None = None) -> UserError:
        """Return the error of a file that is not JSON at a byte, or here."""
        return UserError.one(
            str(self._shown), f"not JSON at byte {self._bytes if at is None else at}: {why}", "fix the file"
        )

    def _advance(self, place: int) -> None:
        self._bytes += len(self._held[self._place : place].encode())
        self._place = place

    def _more(self, size: int) -> None:
        read = self._stream.read(size)
        self._complete = not read
        if not self._bytes and read.startswith(codecs.BOM_UTF8):
            self._bytes = len(codecs.BOM_UTF8)
        try:
            self._held = self._held[self._place :] + self._decoder.decode(read, not read)
        except UnicodeDecodeError as error:
            why = f"not UTF-8 text: {error.reason}"
            raise UserError.one(str(self._shown), why, "convert the file to UTF-8") from None
        self._place = 0
        if self._complete:
            self._stream.close()
