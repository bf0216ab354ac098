"""Draws curves in a terminal. A braille character has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot, by row and column in the character."""
_BLANK = 0x2800


def plot(
    steps: Sequence[int], values: Sequence[float | None], columns: int, rows: int, bottom: float, top: float
) -> list[str]:
    """Return the curve through the points, as ``rows`` lines of ``columns`` characters.

    Args:
        steps: ascending; the first is at the left edge, the last at the right.
        values: one per step; ``None`` is a gap.
        bottom: the value at the lower edge.
        top: the value at the upper edge.
    """
    width, height = 2 * columns, 4 * rows
    span = max(1, steps[-1] - steps[0]) if steps else 1
    value_range = (top - bottom) or 1.0
    cells = [[_BLANK] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for step, value in zip(steps, values, strict=True):
        if value is None:
            before = None
            continue
        share = min(1.0, max(0.0, (value - bottom) / value_range))
        here = (round((step - steps[0]) / span * (width - 1)), round((1 - share) * (height - 1)))
        for x, y in _line(before or here, here):
            cells[y // 4][x // 2] |= _BITS[y % 4][x % 2]
        before = here
    return ["".join(map(chr, row)) for row in cells]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a connected line between two points."""
    across, down = end[0] - begin[0], end[1] - begin[1]
    count = max(abs(across), abs(down), 1)
    return [(begin[0] + round(across * n / count), begin[1] + round(down * n / count)) for n in range(count + 1)]


def bounds(values: Sequence[float | None], from_zero: bool) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value; ``None`` if there is none. ``from_zero`` includes 0."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return (min(0.0, *known) if from_zero else min(known)), max(known)
