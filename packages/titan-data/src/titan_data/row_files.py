"""Files that store rows in groups: what a format provides, and where the groups of a file are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy
import pyarrow
from numpy.typing import NDArray

from titan_core.api import UserError
from titan_core.toolkit.text import shorten
from titan_data.arrow_values import described, features_of
from titan_data.mapped_files import MappedFiles
from titan_data.seekable import ReadFailed

GroupTable: TypeAlias = list[tuple[int, int, int]]
"""Of each group: the row after its last, counted from the file's first, its first byte, and the byte after its last."""


Bounds: TypeAlias = tuple[int, int]


class RowFile(Protocol):
    """What is held of a file: its schema, and where its columns are. Each method but the first gets the number of a group,
    its bounds in the file, and the names of columns."""

    schema: pyarrow.Schema
    held: int
    """Bytes of memory."""
    mapped: bool
    """Whether decoded rows are parts of the memory map of a local file."""

    def groups(self, content: Any) -> GroupTable:
        """Return the groups."""

    def extents(self, group: int, bounds: Bounds, columns: Sequence[str]) -> list[Bounds]:
        """Return the ranges of bytes that are read."""

    def unpacked(self, group: int, bounds: Bounds, columns: Sequence[str]) -> int:
        """Return the bytes of the decoded rows, about."""

    def tables(
        self, content: Any, group: int, bounds: Bounds, columns: Sequence[str], rows: int, most: int
    ) -> Iterator[pyarrow.Table]:
        """Yield the rows, at most ``rows`` at a time where the format allows that.

        Raises:
            TooLarge: what must be decoded at once takes more than ``most`` bytes.
        """


@dataclass(frozen=True)
class Form:
    """A format of files."""

    name: str
    version: str
    """Of the groups that :attr:`opened` finds; see :class:`~titan_data.file_index.FileIndex`."""
    opened: Callable[[Any], RowFile]
    """Opens the contents of a file."""
    verified: bool
    """Whether the library verifies the places of values when it decodes them."""


def schema_mark(schema: pyarrow.Schema) -> int:
    """Return a number that schemas of the same names and types have in common, extension types included."""
    text = "\n".join([*(f"{column.name}: {described(column)}" for column in schema), str(features_of(schema))])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


_MOST_ROWS = 2**48
"""Rows of a file. More would not fit into the numbers that files, epochs and positions are counted by."""


def scan_groups(
    form: Form, shown: dict[Path, Path]
) -> Callable[[Path], Generator[NDArray[numpy.int64], None, tuple[int, int]]]:
    """Return what finds the groups of a file: yields a :data:`GroupTable`, returns its rows and the mark of its schema."""

    def scan(file: Path) -> Generator[NDArray[numpy.int64], None, tuple[int, int]]:
        content = MappedFiles().content(file)
        opened = open_file(form, content, shown[file])
        with understood(lambda why: _refused(form, shown[file], why)):
            table = opened.groups(content)
            ends = [0, *(group[0] for group in table)]
            if ends != sorted(ends) or ends[-1] > _MOST_ROWS:
                raise pyarrow.ArrowInvalid(f"its groups of rows claim to end at the rows {shorten(str(ends[1:]))}")
        yield numpy.array(table, numpy.int64).reshape(-1)
        return (table[-1][0] if table else 0), schema_mark(opened.schema)

    return scan


def open_file(form: Form, content: Any, shown: Path) -> RowFile:
    """Return ``content`` opened in ``form``.

    Raises:
        UserError: it is damaged or encrypted.
        OSError: it cannot be read.
    """
    with understood(lambda why: _refused(form, shown, why)):
        return form.opened(content)


def _refused(form: Form, file: Path, why: str) -> UserError:
    if "decrypt" in why:
        return UserError.one(str(file), "is encrypted, which titan-data does not read", "decrypt it")
    return UserError.one(str(file), f"not {form.name}, or damaged: {why}", "check the path, or copy the file again")


@contextmanager
def understood(raised: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``raised`` of the reason where a file cannot be understood.

    Raises:
        OSError: it cannot be read.
    """
    try:
        yield
    except ReadFailed as error:
        raise error.error from None
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:  # names that are not UTF-8; no such field
        raise raised(" ".join(str(error).split())) from None
