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
    gradient_difference: float
    """The largest relative difference between the rms, or mean, of a parameter's gradients in a step."""
    gradient: str
    """That parameter; empty if the runs have no statistics of gradients."""
    departure: Departure | None
    """``None`` if the runs agree within the tolerance."""
    tolerance: float


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
    gradients = [
        (max(_moment_differences(ours, theirs, floor)), name)
        for step in reference.losses
        for name, ours, theirs, floor in _gradients(step, reference, other, MODULES_WITHIN * tolerance)
    ]
    gradient, parameter = max(gradients, key=lambda one: (one[0] != one[0], one[0]), default=(math.nan, ""))  # NaN first
    return Verdict(largest, gradient, parameter, next(departures, None), tolerance)


def _gradients(step: int, reference: Curve, other: Curve, within: float) -> Iterator[tuple[str, Moments, Moments, float]]:
    """Yield the parameters in the order of backward, with the moments of their gradients in both runs, and the rms that a
    gradient counts as at least."""
    nothing, none = StepStatistics({}, {}), Moments(1, 0.0, 0.0, 0.0, 0)
    ours, theirs = (curve.statistics.get(step, nothing).gradients for curve in (reference, other))
    floor = within * Moments.total(ours.values()).rms
    for name in reversed({**ours, **theirs}):
        yield name, ours.get(name, none), theirs.get(name, none), floor


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
    for name, before, after, floor in _gradients(step, reference, other, within):
        yield from _moment_departures(step, f"the gradient of {name}", before, after, within, floor)
    expected, actual = reference.grad_norms.get(step, math.nan), other.grad_norms.get(step, math.nan)
    if not _relative(expected, actual) <= within:
        yield Departure(step, "the gradient norm", "norm", expected, actual, _relative(expected, actual), within)


def _moment_departures(
    step: int, where: str, expected: Moments, actual: Moments, within: float, floor: float
) -> Iterator[Departure]:
    figures = ("rms", expected.rms, actual.rms), ("mean", expected.mean, actual.mean)
    for (figure, ours, theirs), difference in zip(figures, _moment_differences(expected, actual, floor), strict=True):
        if not difference <= within:
            yield Departure(step, where, figure, ours, theirs, difference, within)


def _moment_differences(expected: Moments, actual: Moments, floor: float) -> tuple[float, float]:
    """Return the relative differences of rms and mean."""
    size = max(expected.rms, floor, 1e-30)
    return abs(expected.rms - actual.rms) / size, abs(expected.mean - actual.mean) / size


def _relative(expected: float, actual: float) -> float:
    return abs(expected - actual) / max(abs(expected), 1e-30)
