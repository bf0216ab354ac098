"""Local JSON lines, one document per line, fetched through an index of line ends that is built when the files are opened."""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api import CorruptRecord, Document
from titan_data.records import Reader

_CHUNK = 1 << 24
_WHITESPACE = numpy.frombuffer(b" \t\n\r\x0b\x0c", numpy.uint8)
"""What :meth:`bytes.strip` removes."""


class JsonRecords:
    """Records fetched by index. Blank lines are skipped."""

    def __init__(self, files: Sequence[Path], shown: Sequence[Path], read: Reader) -> None:
        """
        Args:
            shown: names of the files in error messages. A decompressed copy has the name of the original.
        """
        self._read = read
        self._files = [(_mapped(file), name) for file, name in zip(files, shown, strict=True)]
        self._lines = [_lines_of(content) for content, _ in self._files]
        self._ends = list(accumulate(len(starts) for _, starts, _ in self._lines))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def text(self, index: int) -> Document:
        """Return the document in record ``index``.

        Raises:
            CorruptRecord: the line is not a JSON object with a document.
        """
        number = bisect_right(self._ends, index)
        numbers, starts, ends = self._lines[number]
        line = index - (self._ends[number] - len(starts))
        mapped, shown = self._files[number]
        content = mapped[starts[line] : ends[line]]
        place = f"{shown}:{numbers[line] + 1}"
        return self._read(_record(content, place), place)


def _record(content: bytes, place: str) -> Any:
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        why = f"not UTF-8 text: {error.reason} at byte {error.start} of the line"
        raise CorruptRecord(place, why, "convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(place, f"not a JSON record: {error}", "each line must be one JSON object") from None


def _mapped(file: Path) -> mmap.mmap | bytes:
    with file.open("rb") as stream:
        # An empty file cannot be mapped.
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if file.stat().st_size else b""


def _lines_of(content: mmap.mmap | bytes) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the numbers, first bytes and end bytes of the lines that are not blank."""
    breaks = []
    for at in range(0, len(content), _CHUNK):
        breaks.append(numpy.flatnonzero(numpy.frombuffer(content[at : at + _CHUNK], numpy.uint8) == ord("\n")) + at)
    ends = numpy.concatenate([*breaks, [len(content)]]).astype(numpy.int64)
    starts = numpy.concatenate([[0], ends[:-1] + 1])
    filled = ends > starts
    # Only a line that begins with whitespace can be blank. There are few of them: check their contents.
    candidates = numpy.flatnonzero(filled)
    if len(candidates):
        firsts = numpy.frombuffer(content, numpy.uint8)[starts[candidates]]
        for line in candidates[numpy.isin(firsts, _WHITESPACE)]:
            filled[line] = bool(content[starts[line] : ends[line]].strip())
    return numpy.flatnonzero(filled), starts[filled], ends[filled]
