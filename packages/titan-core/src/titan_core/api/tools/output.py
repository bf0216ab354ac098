"""Tables and JSON on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from titan_core.api.tools.shown import printable


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    print(json.dumps(value, indent=2))


def print_notes(notes: Iterable[str]) -> None:
    """Print ``notes`` (:attr:`titan_core.api.job.Job.notes`), one per line."""
    for note in notes:
        print(f"note: {note}")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with aligned columns; the last one may have any width. (``rich`` would take longer to import than most
    commands take to run.)"""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
