"""A table of texts for the page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of plain texts; the code that renders it escapes them."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Each as long as ``headers``. A run's name in the first cell of a row, or in a later header, gets its colour."""
