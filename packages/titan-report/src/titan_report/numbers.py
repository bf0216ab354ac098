"""Formats numbers, durations and times for people."""

from __future__ import annotations

import time
from typing import Any

from titan_report.thinning import finite

UNKNOWN = "–"


def figure(value: Any, form: str) -> str:
    """Format ``value`` by ``form``; return a dash if it is unknown or not finite."""
    known = finite(value)
    return UNKNOWN if known is None else format(known, form)


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units; return a dash for ``None``."""
    if seconds is None:
        return UNKNOWN
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return f"{whole} s"


def clock(seconds: float) -> str:
    """Format seconds since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def time_zone() -> str:
    """Return the name of the local time zone, which :func:`clock` uses, with its offset from UTC."""
    offset = time.strftime("%z")
    distance = "UTC" if offset == "+0000" else f"UTC{offset[:3]}:{offset[3:]}"
    name = time.strftime("%Z")
    return distance if name in (distance, offset) or name.startswith(("+", "-")) else f"{name} ({distance})"
