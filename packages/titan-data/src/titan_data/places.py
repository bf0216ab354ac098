"""The places of documents as users write them: ``FILE:LINE``, or ``FILE, row N``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

_PLACE: Final = re.compile(
    r"(?P<file>.+?)(?P<mark>:|, (?:line|row|record|document|sample|token|byte) )(?P<number>[0-9]{1,18})"
)


@dataclass(frozen=True)
class Place:
    """A file, and a number in it."""

    file: str
    number: int
    is_line: bool
    """Whether it was written ``FILE:NUMBER``."""


def parse_place(text: str) -> Place | None:
    """Return what ``text`` says; ``None`` if it is not a place."""
    found = _PLACE.fullmatch(text.strip())
    return Place(found["file"], int(found["number"]), found["mark"] == ":") if found else None


def file_at(name: str, files: Sequence[str]) -> int | None:
    """Return the number of the file ``name`` in ``files``: the one of this path, or else the only one whose path ends with
    it."""
    if name in files:
        return files.index(name)
    absolute = [os.path.abspath(file) for file in files]
    if (path := os.path.abspath(name)) in absolute:
        return absolute.index(path)
    parts = PurePath(name).parts
    ending = [number for number, file in enumerate(absolute) if PurePath(file).parts[-len(parts) :] == parts]
    return ending[0] if len(ending) == 1 else None
