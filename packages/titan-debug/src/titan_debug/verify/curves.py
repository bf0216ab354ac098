"""Compares two runs of one recipe on different meshes, and locates where they diverge. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titan_debug.numerics.statistics import Moments, StepStatistics

MODULES_WITHIN = 10.0
"""Tolerance for a module's statistics, as a multiple of the loss tolerance. The loss, a mean over many tokens, is more
accurate."""


@dataclass(frozen=True)
class Curve:
    """The figures of a run by step."""

    losses: Mapping[int, float]
    grad_norms: Mapping[int, float]
    statistics: Mapping[int, StepStatistics]


@dataclass(frozen=True)
class Departure:
    """The first figure in which a run differs from the reference."""

    step: int
    where: str
    """``"the output of layers.1.feed_forward.w2"``, ``"the gradient of ..."``, ``"the loss"``."""
    figure: str
    """The compared figure: ``"rms"``, ``"mean"``, ``"loss"`` or ``"norm"``."""
    reference: float
    value: float
    difference: float
    """Relative to the reference. For a mean, relative to the rms; for a nearly zero gradient, relative to a share of the rms
    of all gradients."""
    allowed: float
    """The largest relative difference within the tolerance."""

    def __str__(self) -> str:
        figures = f"{self.figure} {self.value:.6g} instead of {self.reference:.6g}"
        return f"step {self.step} in {self.where}: {figures} (difference {self.difference:.1e}, allowed {self.allowed:.1e})"


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with the reference."""

    loss_difference: float
    """The largest relative difference between the losses of a step."""
    departure: Departure | None
    """``None`` if the runs agree within the tolerance."""


def compare(reference: Curve, other: Curve, tolerance: float) -> Verdict:
    """Compare ``other`` with ``reference``.

    Within a step, figures are compared in the order in which an error would spread: outputs in call order, the loss,
    gradients in the order of backward, the gradient norm.

    A gradient that is zero in theory, such as that of a key's bias under softmax, consists of rounding errors in practice,
    and these differ completely between meshes. A gradient therefore counts as no smaller than ``MODULES_WITHIN * tolerance``
    times the root mean square of all gradients.

    Args:
        tolerance: the largest relative difference between losses that counts as rounding.
    """
    differences = [_relative(loss, other.losses.get(step, math.nan)) for step, loss in reference.losses.items()]
    departures = (found for step in reference.losses for found in _departures(step, reference, other, tolerance))
    largest = math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)
    return Verdict(largest, next(departures, None))


def _departures(step: int, reference: Curve, other: Curve, tolerance: float) -> Iterator[Departure]:
    nothing = StepStatistics({}, {})
    ours, theirs = reference.statistics.get(step, nothing), other.statistics.get(step, nothing)
    within = MODULES_WITHIN * tolerance
    for name in ours.outputs:
        if name in theirs.outputs:
            where = f"the output of {name}"
            yield from _moment_departures(step, where, ours.outputs[name], theirs.outputs[name], within, floor=0.0)
    expected, actual = reference.losses[step], other.losses.get(step, math.nan)  # the other run may have ended earlier
    if not _relative(expected, actual) <= tolerance:
        yield Departure(step, "the loss", "loss", expected, actual, _relative(expected, actual), tolerance)
    floor = within * Moments.total(ours.gradients.values()).rms
    none = Moments(1, 0.0, 0.0, 0.0, 0)
    for name in reversed({**ours.gradients, **theirs.gradients}):
        both = ours.gradients.get(name, none), theirs.gradients.get(name, none)
        yield from _moment_departures(step, f"the gradient of {name}", *both, within, floor)
    expected, actual = reference.grad_norms.get(step, math.nan), other.grad_norms.get(step, math.nan)
    if not _relative(expected, actual) <= within:
        yield Departure(step, "the gradient norm", "norm", expected, actual, _relative(expected, actual), within)


def _moment_departures(
    step: int, where: str, expected: Moments, actual: Moments, within: float, floor: float
) -> Iterator[Departure]:
    size = max(expected.rms, floor, 1e-30)
    for figure, ours, theirs in (("rms", expected.rms, actual.rms), ("mean", expected.mean, actual.mean)):
        difference = abs(ours - theirs) / size
        if not difference <= within:
            yield Departure(step, where, figure, ours, theirs, difference, within)


def _relative(expected: float, actual: float) -> float:
    return abs(expected - actual) / max(abs(expected), 1e-30)
