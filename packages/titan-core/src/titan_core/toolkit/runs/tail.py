"""Follows a growing file, and returns each new record once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.toolkit.files import open_file
from titan_core.toolkit.json_lines import complete_lines, parsed

_MARK = 512
"""Number of last-read bytes to keep. If the file no longer contains them at the same offset, it has been replaced."""


class Tail:
    """Follows a file with one JSON object per line. The file may not exist yet, may end in an incomplete line, and may be
    replaced by another file.

    Args:
        flaw_of: returns what is wrong with an object, or ``None``. An object with a flaw counts as damaged.
    """

    def __init__(self, file: Path, flaw_of: Callable[[dict[str, Any]], str | None] = lambda record: None) -> None:
        self._file = file
        self._flaw_of = flaw_of
        self._offset = 0
        self._mark = b""
        self.damaged = 0
        """Number of complete lines so far that are not JSON objects, that are longer or deeper than any that a run writes,
        or that have a flaw."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file has been replaced, which invalidates all earlier records, and the objects on new lines.

        Raises:
            UserError: the file cannot be read.
        """
        records: list[dict[str, Any]] = []
        return self.read_each(records.append, records.clear), records

    def read_each(self, take: Callable[[dict[str, Any]], object], forget: Callable[[], object]) -> bool:
        """Pass the objects on new lines to ``take``, one by one: there may be more than fit into memory. If the file has
        been replaced, call ``forget`` first. Return whether it was.

        Raises:
            UserError: the file cannot be read.
        """
        replaced = False
        try:
            with open_file(self._file, inside=self._file.parent) as file:
                file.seek(self._offset - len(self._mark))
                replaced = file.read(len(self._mark)) != self._mark
                if replaced:
                    self._forget()
                    forget()
                    file.seek(0)
                for length, line in complete_lines(file):
                    self._offset += length
                    if line is None:
                        place = file.tell()
                        file.seek(self._offset - _MARK)
                        self._mark = file.read(_MARK)
                        file.seek(place)
                    else:
                        self._mark = (self._mark + line)[-_MARK:]
                    record = parsed(line)
                    if record is None or self._flaw_of(record) is not None:
                        self.damaged += 1
                    else:
                        take(record)
        except FileNotFoundError:
            replaced = self._offset > 0
            self._forget()
            if replaced:
                forget()
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
            raise UserError.one(str(self._file), why, "make the file readable, and try again") from None
        return replaced

    def _forget(self) -> None:
        self._offset, self._mark, self.damaged = 0, b"", 0
