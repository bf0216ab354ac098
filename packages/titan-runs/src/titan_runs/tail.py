"""The end of a file that others write: what is new in it, read once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_core.api.errors import UserError

_MARK = 512
"""As many of the last bytes that were read are remembered, to see that the file still continues from them."""


class Tail:
    """Follows a file of one JSON object a line. It may not exist yet, end in half a line, or be replaced by another.

    Args:
        flaw_of: what is wrong with an object, ``None`` if nothing is; one with a flaw is damaged.
    """

    def __init__(self, file: Path, flaw_of: Callable[[dict[str, Any]], str | None] = lambda record: None) -> None:
        self._file = file
        self._flaw_of = flaw_of
        self._offset = 0
        self._mark = b""
        self.damaged = 0
        """Whole lines so far that are no JSON objects, or have a flaw."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file is another one than before (then what was read before counts no longer), and the objects of the
        lines that are new.

        Raises:
            UserError: it cannot be read.
        """
        records = []
        try:
            with self._file.open("rb") as file:
                file.seek(self._offset - len(self._mark))
                replaced = file.read(len(self._mark)) != self._mark
                if replaced:
                    self._forget()
                    file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written, or a killed process has left it
                    self._offset += len(line)
                    self._mark = (self._mark + line)[-_MARK:]
                    record = _parsed(line)
                    if record is None or self._flaw_of(record) is not None:
                        self.damaged += 1
                    else:
                        records.append(record)
        except FileNotFoundError:
            replaced = self._offset > 0
            self._forget()
        except OSError as error:
            raise UserError.one(str(self._file), f"cannot be read: {error.strerror}", "see to it, and try again") from None
        return replaced, records

    def _forget(self) -> None:
        self._offset, self._mark, self.damaged = 0, b"", 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
