"""Assigns colours to runs: the same in every chart, and distinct under the common colour vision deficiencies."""

from __future__ import annotations

from collections.abc import Mapping

LIGHT = ("#1f6fb4", "#c9540a", "#6b2450", "#2aa693", "#d8b018", "#b09af0")
"""For a light page. Any two differ by at least 20 in CIELAB, also under simulated protanopia, deuteranopia and tritanopia
(Machado et al., 2009), because they differ in lightness too."""
DARK = ("#5aa9f0", "#f2803a", "#c25b9e", "#5fd9bf", "#f4e08a", "#d3c9ff")
"""The same colours for a dark page. Any two differ by at least 17."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""If there are more runs than colours, the colours repeat in further rounds with another dash and another marker."""
TINTS = (0.28, 0.5, 0.95, 0.7, 0.12)
"""Opacities of stacked parts, in the run's colour. The first part is the largest and gets a subdued tint."""

OF_CAUSES: Mapping[str, tuple[str, float]] = {
    "steps": ("run-0", 1.0),
    "lost": ("run-1", 1.0),
    "start": ("run-2", 1.0),
    "restart": ("run-2", 0.5),
    "compile": ("run-3", 1.0),
    "data": ("run-1", 0.45),
    "save": ("run-4", 1.0),
    "evaluation": ("run-5", 1.0),
    "idle": ("muted", 0.45),
    "not recorded": ("muted", 0.2),
}
"""Colour and opacity of each cause: nine tints of one colour could not be told apart."""


def colour_of(run: int) -> int:
    """Return the index of a run's colour."""
    return run % len(LIGHT)


def round_of(run: int) -> int:
    """Return the round of colours that a run belongs to, from 0."""
    return run // len(LIGHT) % len(DASHES)


def dash_of(run: int) -> str:
    """Return the dash of a run's lines."""
    return DASHES[round_of(run)]


def tint_of(part: int, parts: int) -> float:
    """Return the opacity of part number ``part`` of ``parts`` stacked parts."""
    if parts <= len(TINTS):
        return TINTS[part]
    return 0.12 + 0.83 * part / (parts - 1)
