"""Maps the numbers of documents to byte ranges in files; reads ahead, and computes the cost of an
order of documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from titan_data.mapped_files import MappedFiles
from titan_data.places import file_at, parse_place


class FileDocuments(ABC):
    """The documents of some files, numbered through (:class:`~titan_core.api.data.shuffled.RandomAccess`)."""

    mark: str = ", document "
    """What is between the file and the number in the place of a document."""
    may_contain: bool = False
    """Whether a number of :meth:`number_of` is where a document begins, so that a place may be inside of it."""

    def __init__(self, upto: Sequence[int] | NDArray[Any]) -> None:
        """``upto``: number of documents up to the end of each file."""
        self._upto: Any = upto
        self._maps = MappedFiles()

    def __len__(self) -> int:
        return int(self._upto[-1]) if len(self._upto) else 0

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file that contains document ``index``, and the document's number in it."""
        file = bisect_right(self._upto, index)
        return file, index - (int(self._upto[file - 1]) if file else 0)

    def place(self, index: int) -> str:
        """Return where document ``index`` is, such as ``FILE:LINE``."""
        file, document = self.locate(index)
        return f"{self.name_of(file)}{self.mark}{self.number_of(file, document)}"

    def find(self, place: str) -> int | None:
        """Return the number of the document at ``place``: the file, as :meth:`place` writes it or as its end, and the number
        of the line, row or record; ``None`` if there is none."""
        parsed = parse_place(place)
        if parsed is None:
            return None
        file = file_at(parsed.file, [str(self.name_of(number)) for number in range(len(self._upto))])
        if file is None:
            return None
        first = int(self._upto[file - 1]) if file else 0
        documents, number = range(int(self._upto[file]) - first), self.parsed_number(file, parsed.number, parsed.is_line)
        found = bisect_right(documents, number, key=lambda document: self.number_of(file, document)) - 1
        if found < 0 or not (self.may_contain or self.number_of(file, found) == number):
            return None
        return first + found

    @abstractmethod
    def name_of(self, file: int) -> Path:
        """Return the name of file number ``file`` in messages: a decompressed copy has that of the original."""

    def number_of(self, file: int, document: int) -> int:
        """Return the number of document ``document`` of a file in messages: its line, for example."""
        return document

    def parsed_number(self, file: int, number: int, is_line: bool) -> int:
        """Return the number of a place as :meth:`number_of` counts. ``is_line``: whether it was written ``FILE:NUMBER``."""
        return number

    def read_ahead(self, first: int, last: int) -> None:
        """Start reading documents ``first`` to ``last`` (exclusive)."""
        for file, begin, end in self.extents(first, last):
            self._maps.read_ahead(file, begin, end)

    def extents(self, first: int, last: int) -> list[tuple[Path, int, int]]:
        """Return where documents ``first`` to ``last`` (exclusive) are: files, first and end bytes."""
        found = []
        while first < last:
            number, document = self.locate(first)
            upto = min(last, int(self._upto[number]))
            found += self.ranges(number, document, document + upto - first)
            first = upto
        return found

    @abstractmethod
    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """Return :meth:`extents` of documents ``first`` to ``last`` (exclusive) of file ``number``."""
