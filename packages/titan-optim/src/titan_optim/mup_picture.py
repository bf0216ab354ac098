"""The picture of a coordinate check: an SVG with one panel for each way to train. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 320, 240, 64, 40, 44
"""Sizes in pixels: of a panel, and of what is around it."""


def picture(changes: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Return the SVG of ``changes``: kind of training -> width as a multiple of the base model -> module -> change."""
    values = [max(value, 1e-30) for by_width in changes.values() for of in by_width.values() for value in of.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    factors = list(next(iter(changes.values())))
    most = math.log(max(factors))

    def x(panel: int, factor: int) -> float:
        return LEFT + panel * (WIDTH + GAP) + WIDTH * math.log(factor) / most

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - math.log10(max(value, 1e-30))) / (high - low)

    modules = list(next(iter(next(iter(changes.values())).values())))
    parts = []
    for power in range(low, high + 1):
        parts.append(_text(LEFT - 8, y(10.0**power) + 4, f"1e{power}", "end"))
    for panel, (kind, by_width) in enumerate(changes.items()):
        left = x(panel, 1)
        parts.append(f'<rect x="{left:.1f}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>')
        parts.append(_text(left + WIDTH / 2, TOP - 14, kind, "middle"))
        parts += [_text(x(panel, factor), TOP + HEIGHT + 18, f"x {factor}", "middle") for factor in factors]
        for number, module in enumerate(modules):
            points = " ".join(f"{x(panel, factor):.1f},{y(of[module]):.1f}" for factor, of in by_width.items())
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{_color(number, len(modules))}" stroke-width="2"/>'
            )
    right = LEFT + len(changes) * (WIDTH + GAP)
    for number, module in enumerate(modules):
        line = TOP + 12 + 18 * number
        color = _color(number, len(modules))
        parts.append(
            f'<line x1="{right}" y1="{line - 4}" x2="{right + 20}" y2="{line - 4}" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(_text(right + 26, line, module, "start"))
    title = "Change of activations, by width as a multiple of the base model"
    parts.append(_text(LEFT, TOP + HEIGHT + 44, title, "start"))
    size = f'width="{right + 220}" height="{max(TOP + HEIGHT + 60, TOP + 24 + 18 * len(modules))}"'
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{background}\n{body}\n</svg>\n'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _color(number: int, of: int) -> str:
    """Return a color from blue, of the first module, to red, of the last."""
    return f"hsl({240 - 240 * number / max(of - 1, 1):.0f} 70% 45%)"
