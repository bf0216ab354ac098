"""Documents that follow one another in files: which file has which, what is read ahead, and what an order of them costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from titan_data.mapped_files import MappedFiles


class FileDocuments(ABC):
    """The documents of some files, numbered through (:class:`~titan_core.api.RandomAccess`)."""

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
