"""Whether two runs of one recipe on different meshes are the same, and if not, where they part. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titan_debug.statistics.moments import Moments
from titan_debug.statistics.read import StepStatistics

MODULES_WITHIN = 10.0
"""How many times the loss's tolerance a module's statistics may be apart: the loss is a mean over many tokens."""


@dataclass(frozen=True)
class Curve:
    """What a run did, step by step."""

    losses: Mapping[int, float]
    statistics: Mapping[int, StepStatistics]


@dataclass(frozen=True)
class Departure:
    """The first thing in which a run is not as the reference."""

    step: int
    where: str
    """``"the output of layers.1.feed_forward.w2"``, ``"the gradient of ..."``, ``"the loss"``."""
    figure: str
    """What is compared: ``"rms"``, ``"mean"``, ``"loss"``."""
    reference: float
    value: float
    difference: float
    """Relative to the reference (a mean's, to its rms)."""
    allowed: float

    def __str__(self) -> str:
        figures = f"{self.figure} {self.value:.6g} instead of {self.reference:.6g}"
        return f"step {self.step}, {self.where}: {figures} ({self.difference:.1e} apart, {self.allowed:.1e} allowed)"


@dataclass(frozen=True)
class Verdict:
    """Of a run against the reference."""

    loss_difference: float
    """The largest relative difference of the losses of a step."""
    departure: Departure | None
    """``None``: the runs are the same, within the tolerance."""


def compare(reference: Curve, other: Curve, tolerance: float) -> Verdict:
    """Hold ``other`` against ``reference``.

    A step is looked at in the order in which an error would spread: outputs in the order of calls, the loss, gradients in
    the order of backward.

    Args:
        tolerance: the largest relative difference of losses that is rounding.
    """
    differences = [_relative(loss, other.losses.get(step, math.nan)) for step, loss in reference.losses.items()]
    departures = (one for step in reference.losses for one in _departures(step, reference, other, tolerance))
    largest = math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)
    return Verdict(largest, next(departures, None))


def _departures(step: int, reference: Curve, other: Curve, tolerance: float) -> Iterator[Departure]:
    nothing = StepStatistics({}, {})
    ours, theirs = reference.statistics.get(step, nothing), other.statistics.get(step, nothing)
    within = MODULES_WITHIN * tolerance
    for name in ours.outputs:
        if name in theirs.outputs:
            where = f"the output of {name}"
            yield from _moments_apart(step, where, ours.outputs[name], theirs.outputs[name], within)
    one, two = reference.losses[step], other.losses.get(step, math.nan)  # it may have ended before
    if not _relative(one, two) <= tolerance:
        yield Departure(step, "the loss", "loss", one, two, _relative(one, two), tolerance)
    for name in reversed(ours.gradients):
        if name in theirs.gradients:
            where = f"the gradient of {name}"
            yield from _moments_apart(step, where, ours.gradients[name], theirs.gradients[name], within)
        else:
            yield Departure(step, f"the gradient of {name}", "rms", ours.gradients[name].rms, 0.0, 1.0, within)


def _moments_apart(step: int, where: str, one: Moments, two: Moments, within: float) -> Iterator[Departure]:
    size = max(one.rms, 1e-30)
    for figure, ours, theirs in (("rms", one.rms, two.rms), ("mean", one.mean, two.mean)):
        apart = abs(ours - theirs) / size
        if not apart <= within:
            yield Departure(step, where, figure, ours, theirs, apart, within)


def _relative(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), 1e-30)
