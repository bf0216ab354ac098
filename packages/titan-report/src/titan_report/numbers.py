"""Figures as people read them."""

from __future__ import annotations

import time
from typing import Any

from titan_report.thinning import finite

UNKNOWN = "–"


def figure(value: Any, form: str) -> str:
    """``value`` by the format ``form``; a dash where it is not known."""
    known = finite(value)
    return UNKNOWN if known is None else format(known, form)


def duration(seconds: float | None) -> str:
    """In the two largest units that it has."""
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
    """A time since the epoch as date and time of day on this machine's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def time_zone() -> str:
    """The name of the zone that :func:`clock` gives times in, with its distance from UTC."""
    offset = time.strftime("%z")
    distance = "UTC" if offset == "+0000" else f"UTC{offset[:3]}:{offset[3:]}"
    name = time.strftime("%Z")
    return distance if name in (distance, offset) or name.startswith(("+", "-")) else f"{name} ({distance})"
