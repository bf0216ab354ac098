"""Fewer points for long curves, without losing what stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

POINTS = 2000
"""As many points of a curve as are drawn at most."""


def finite(value: Any) -> float | None:
    """A figure of a record; ``None`` where it is not known or no finite number, which is a gap."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def extremes(values: Sequence[float | None], points: int = POINTS) -> list[int]:
    """Indices of at most ``points`` of ``values``, in order: all if there are no more, else the ends, and of each of equal
    stretches the smallest, the largest and, if there is one, a gap (``None``)."""
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
