"""How runs, numbers, durations and tables appear to people."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.toolkit.text import show_seconds

UNKNOWN = "–"


@dataclass(frozen=True)
class Table:
    """A table of plain texts; the code that renders it escapes them."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Each as long as ``headers``. A run's name in the first cell of a row, or in a later header, gets its colour."""


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder, prefixed with as many parents as needed to make it unique. The folders must differ."""
    parts = [[part for part in folder.resolve().parts if part != folder.anchor] or ["/"] for folder in folders]
    taken = [1] * len(folders)
    while True:
        names = ["/".join(part[-count:]) for part, count in zip(parts, taken, strict=True)]
        counts = Counter(names)
        longer = [
            min(count + 1, len(part)) if counts[name] > 1 else count
            for part, count, name in zip(parts, taken, names, strict=True)
        ]
        if longer == taken:
            return names
        taken = longer


def finite(value: Any) -> float | None:
    """Return ``value`` if it is a finite number, else ``None``, which curves show as a gap."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def figure(value: Any, form: str) -> str:
    """Format ``value`` by ``form``; return a dash if it is unknown or not finite."""
    known = finite(value)
    return UNKNOWN if known is None else format(known, form)


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units; return a dash for ``None``."""
    return UNKNOWN if seconds is None else show_seconds(seconds)


def clock(seconds: float) -> str:
    """Format seconds since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def time_zone() -> str:
    """Return the name of the local time zone, which :func:`clock` uses, with its offset from UTC."""
    offset = time.strftime("%z")
    distance = "UTC" if offset == "+0000" else f"UTC{offset[:3]}:{offset[3:]}"
    name = time.strftime("%Z")
    return distance if name in (distance, offset) or name.startswith(("+", "-")) else f"{name} ({distance})"
