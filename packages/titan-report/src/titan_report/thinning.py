"""Thins long curves, but keeps their extremes and gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

POINTS = 2000
"""Largest number of points to draw of a curve."""


def finite(value: Any) -> float | None:
    """Return ``value`` if it is a finite number, else ``None``, which curves show as a gap."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def extremes(values: Sequence[float | None], points: int = POINTS) -> list[int]:
    """Return the indices of at most ``points`` of ``values``, in order. If there are more values, these are both ends and,
    from each of several equal stretches, the smallest value, the largest value, and a gap (``None``) if there is one."""
    if len(values) <= points:
        return list(range(len(values)))
    stretches = max(1, (points - 2) // 3)
    kept = {0, len(values) - 1}
    for number in range(stretches):
        stretch = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        known = [(value, index) for index in stretch if (value := values[index]) is not None]
        if known:
            kept.update((min(known)[1], max(known)[1]))
        if len(known) < len(stretch):
            kept.add(next(index for index in stretch if values[index] is None))
    return sorted(kept)
