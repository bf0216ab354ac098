"""Local plain text. A file is one text; long ones are cut into pieces, so that a book can feed any number of logical shards.

Where pieces begin follows from their numbers: at the first line end after a multiple of their size, or else at a space, or
between two characters. Nothing but the sizes of the files is read or held to find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from titan_core.api import (
    CorruptRecord,
    DatasetContext,
    DocumentPlace,
    DocumentShard,
    DocumentSource,
    ShuffledDocuments,
    TextPart,
    UserError,
)
from titan_core.toolkit.reading import Shuffle
from titan_data.compressed import decompressed
from titan_data.file_documents import FileDocuments
from titan_data.local_files import EMPTY, EMPTY_FIX, ENDINGS, find_files

PIECE: Final = 32 * 1024
"""Size of the pieces in bytes, if there are enough of them for all logical shards."""
SMALLEST: Final = 8
_SEARCHED = 4096
_CUTS = (re.compile(rb"\n"), re.compile(rb"[ \t]"), re.compile(rb"(?s).(?=[^\x80-\xbf])"))
"""Where a piece may end, from the best: after a line, after a space, between two characters."""


class TextPieces(FileDocuments):
    """Byte ranges of text files."""

    mark = ", byte "
    may_contain = True

    def __init__(self, files: Sequence[Path], shown: Sequence[Path], sizes: Sequence[int], size: int) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.
            sizes: of the files, in bytes.
            size: of the pieces, in bytes.
        """
        self._files, self._shown, self._sizes, self._size = files, shown, sizes, size
        super().__init__([*accumulate(_num_pieces(of_file, size) for of_file in sizes)])

    def text(self, index: int) -> TextPart:
        """Return the text of piece ``index``.

        Raises:
            CorruptRecord: its bytes are not UTF-8.
        """
        number, piece = self.locate(index)
        size, first = self._sizes[number], piece * self._size
        content = self._content(number, first)
        begin = self._cut(content, 0) if piece else 0
        last = index + 1 == self._upto[number]
        end = size - first if last else self._cut(content, self._size)
        try:
            text = content[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            why = f"not UTF-8 text: {error.reason} at byte {first + begin + error.start}"
            raise CorruptRecord(str(self._shown[number]), why, "convert the file to UTF-8") from None
        return TextPart(text, begins=piece == 0, ends=last)

    def name_of(self, file: int) -> Path:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self._shown[file]

    def number_of(self, file: int, document: int) -> int:
        """Return the first byte of a piece."""
        first = document * self._size
        return first + self._cut(self._content(file, first), 0) if document else 0

    def parsed_number(self, file: int, number: int, is_line: bool) -> int:
        """Return the first byte of a line, or ``number``."""
        if not is_line:
            return number
        content, at = self._maps.content(self._files[file]), 0
        for _ in range(number - 1):
            at = content.find(b"\n", at) + 1
            if not at:
                return len(content)
        return at

    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.file_documents.FileDocuments`. Pieces begin and end some bytes later."""
        size = self._sizes[number]
        end = size if last == _num_pieces(size, self._size) else last * self._size
        return [(self._files[number], first * self._size, end)]

    def _content(self, file: int, first: int) -> bytes:
        """Return as many bytes from ``first`` on as a piece may have."""
        content: bytes = self._maps.content(self._files[file])[first : first + self._size + _searched(self._size)]
        return content

    def _cut(self, content: bytes, at: int) -> int:
        """Return where a piece ends whose size ends at ``at``: at most as many bytes later as a piece has."""
        upto = at + _searched(self._size)
        for cut in _CUTS:
            if found := cut.search(content, at, upto):
                return found.end()
        return upto


def _searched(size: int) -> int:
    """Return within how many bytes a piece of ``size`` bytes is cut."""
    return min(size, _SEARCHED)


def _num_pieces(of_file: int, size: int) -> int:
    """Return the number of pieces in a file of ``of_file`` bytes. None begins so close to its end that nothing may be
    left."""
    return max(-(-(of_file - _searched(size)) // size), 1 if of_file else 0)


class TextFiles:
    """Text files, in pieces whose size depends on the number of logical shards, so that each of these has some."""

    num_documents = None

    def __init__(self, files: Sequence[Path], shown: Sequence[Path], seed: int, shuffle: Shuffle = "documents") -> None:
        """``shown``: see :class:`TextPieces`."""
        self._files, self._shown, self._seed, self._shuffle = files, shown, seed, shuffle
        self._sizes = [file.stat().st_size for file in files]
        self._sources: dict[int, ShuffledDocuments] = {}

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(self._sizes)

    @cached_property
    def fingerprint(self) -> dict[str, Any] | None:
        """See :class:`~titan_core.api.DocumentSource`."""
        return self._shuffled(PIECE).fingerprint

    @property
    def order(self) -> str:
        """See :class:`~titan_core.api.DocumentSource`."""
        return f"pieces of texts, {self._shuffled(PIECE).order}"

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """See :class:`~titan_core.api.DocumentSource`."""
        return self._shuffled(self._size(count)).shard(index, count, epoch)

    def find(self, place: str, count: int) -> DocumentPlace | None:
        """See :meth:`~titan_core.api.ShuffledDocuments.find`: the piece that contains the place."""
        return self._shuffled(self._size(count)).find(place, count)

    def position(self, index: int, count: int, epoch: int) -> tuple[int, int]:
        """See :meth:`~titan_core.api.ShuffledDocuments.position`."""
        return self._shuffled(self._size(count)).position(index, count, epoch)

    def requests(self, index: int, count: int, epoch: int) -> Iterator[tuple[int, list[tuple[Path, int, int]]]]:
        """See :meth:`~titan_core.api.ShuffledDocuments.requests`."""
        return self._shuffled(self._size(count)).requests(index, count, epoch)

    def _size(self, count: int) -> int:
        """Return the size of the pieces for ``count`` shards."""
        size = PIECE
        while size > SMALLEST and sum(_num_pieces(of_file, size) for of_file in self._sizes) < count:
            size //= 2
        return size

    def _shuffled(self, size: int) -> ShuffledDocuments:
        """Return pieces of ``size`` bytes."""
        if size not in self._sources:
            pieces = TextPieces(self._files, self._shown, self._sizes, size)
            self._sources[size] = ShuffledDocuments(pieces, self._seed, self._files, self._shuffle)
        return self._sources[size]


def open_text(context: DatasetContext[None]) -> DocumentSource:
    """Open the text files at ``training.dataset_path``.

    Raises:
        UserError: there is none, or all are empty.
    """
    files = find_files(context, ENDINGS["text"])
    source = TextFiles(decompressed(files, context.max_record_bytes), files, context.seed, context.shuffle)
    if not source.bytes:
        raise UserError.one(context.where, EMPTY, EMPTY_FIX)
    return source
