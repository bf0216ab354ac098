"""The colours of runs: one a run, the same in every chart, distinct under the common colour blindnesses as well."""

from __future__ import annotations

LIGHT = ("#1f6fb4", "#c9540a", "#6b2450", "#2aa693", "#d8b018", "#b09af0")
"""On white. Under simulated protanopia, deuteranopia and tritanopia (Machado et al., 2009) any two differ by at least 20 in
CIELAB, since they differ in lightness too."""
DARK = ("#5aa9f0", "#f2803a", "#c25b9e", "#5fd9bf", "#f4e08a", "#d3c9ff")
"""Those of the same runs on a dark page; at least 17 apart."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""With more runs than colours, the colours come again in another round: with another dash, and another mark."""
TINTS = (0.28, 0.5, 0.95, 0.7, 0.12)
"""Opacities of what is stacked, in the run's colour: the first is the largest and lies quietly."""


def colour_of(run: int) -> int:
    """Which colour the run of this number has."""
    return run % len(LIGHT)


def round_of(run: int) -> int:
    """Which round of the colours that is."""
    return run // len(LIGHT) % len(DASHES)


def dash_of(run: int) -> str:
    """The dash of its lines."""
    return DASHES[round_of(run)]


def tint_of(part: int, parts: int) -> float:
    """The opacity of the ``part``-th of ``parts`` that are stacked."""
    if parts <= len(TINTS):
        return TINTS[part]
    return 0.12 + 0.83 * part / (parts - 1)
