"""A table of texts, as the page shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Plain texts; the caller escapes them."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """As long as ``headers`` each. A run's name in a row's first cell, or in another header, gets its colour."""
