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
    grad_norms: Mapping[int, float]
    statistics: Mapping[int, StepStatistics]


@dataclass(frozen=True)
class Departure:
    """The first thing in which a run is not as the reference."""

    step: int
    where: str
    """``"the output of layers.1.feed_forward.w2"``, ``"the gradient of ..."``, ``"the loss"``."""
    figure: str
    """What is compared: ``"rms"``, ``"mean"``, ``"loss"``, ``"norm"``."""
    reference: float
    value: float
    difference: float
    """Relative to the reference (a mean's, to its rms; that of a gradient that is next to nothing, to a share of the rms of
    all gradients)."""
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
    the order of backward, their norm.

    A gradient that is zero in theory, such as that of a key's bias under softmax, consists of rounding errors in practice,
    which differ between meshes entirely. So a gradient counts as no smaller than ``MODULES_WITHIN * tolerance`` times the
    root mean square of all gradients.

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
            yield from _moments_apart(step, where, ours.outputs[name], theirs.outputs[name], within, floor=0.0)
    one, two = reference.losses[step], other.losses.get(step, math.nan)  # it may have ended before
    if not _relative(one, two) <= tolerance:
        yield Departure(step, "the loss", "loss", one, two, _relative(one, two), tolerance)
    floor = within * Moments.total(ours.gradients.values()).rms
    none = Moments(1, 0.0, 0.0, 0.0, 0)
    for name in reversed({**ours.gradients, **theirs.gradients}):
        both = ours.gradients.get(name, none), theirs.gradients.get(name, none)
        yield from _moments_apart(step, f"the gradient of {name}", *both, within, floor)
    one, two = reference.grad_norms.get(step, math.nan), other.grad_norms.get(step, math.nan)
    if not _relative(one, two) <= within:
        yield Departure(step, "the gradient norm", "norm", one, two, _relative(one, two), within)


def _moments_apart(step: int, where: str, one: Moments, two: Moments, within: float, floor: float) -> Iterator[Departure]:
    size = max(one.rms, floor, 1e-30)
    for figure, ours, theirs in (("rms", one.rms, two.rms), ("mean", one.mean, two.mean)):
        apart = abs(ours - theirs) / size
        if not apart <= within:
            yield Departure(step, where, figure, ours, theirs, apart, within)


def _relative(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), 1e-30)
