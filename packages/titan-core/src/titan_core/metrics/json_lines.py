"""Files of one JSON object a line, which a process that is killed at any instant leaves readable."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from titan_core.errors import UserError


def open_lines(file: Path) -> TextIO:
    """Open ``file`` to append whole lines to. What a killed process left of its last line is cut off first; each line is
    with the operating system once it is written."""
    if file.exists():
        whole = file.read_bytes().rfind(b"\n") + 1
        if whole < file.stat().st_size:
            with file.open("r+b") as torn:
                torn.truncate(whole)
    return file.open("a", encoding="utf-8", buffering=1)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of ``file``; none where there is no file. What a killed process left of its last line is left out.

    Raises:
        UserError: another line is damaged.
    """
    if not file.exists():
        return []
    records = []
    with file.open("rb") as lines:  # a torn line may end within a character
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise UserError.one(f"{file}:{number}", "this line is no JSON object", "remove it, or restore the file")
            # Each line would bring keys of its own, which take more memory than the values.
            records.append({sys.intern(key): value for key, value in record.items()})
    return records
