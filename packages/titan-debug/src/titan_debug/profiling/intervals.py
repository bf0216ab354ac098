"""Sets of moments as intervals: arrays of shape ``[n, 2]``, each row from its start up to, and without, its end."""

from __future__ import annotations

from collections.abc import Callable

import numpy
from numpy.typing import NDArray

Intervals = NDArray[numpy.float64]
_Mask = NDArray[numpy.bool_]


def union(one: Intervals, other: Intervals | None = None) -> Intervals:
    """What lies in an interval of ``one`` (or of ``other``): sorted, and none touches the next."""
    return _select(one, _none() if other is None else other, numpy.logical_or)


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """What lies in both; sorted, and none touches the next."""
    return _select(one, other, numpy.logical_and)


def difference(one: Intervals, other: Intervals) -> Intervals:
    """What lies in ``one`` and not in ``other``; sorted, and none touches the next."""
    return _select(one, other, lambda in_one, in_other: in_one & ~in_other)


def length(intervals: Intervals) -> float:
    """How long all of it is, each moment counted once."""
    merged = union(intervals)
    return float((merged[:, 1] - merged[:, 0]).sum())


def _select(one: Intervals, other: Intervals, keep: Callable[[_Mask, _Mask], _Mask]) -> Intervals:
    """Between two neighbouring edges of all intervals nothing changes, so each such piece is kept or not."""
    edges = numpy.unique(numpy.concatenate([one.ravel(), other.ravel()]))
    kept = keep(_covered(one, edges[:-1]), _covered(other, edges[:-1]))
    # Runs of pieces that are kept: where one begins, and where it ends.
    changes = numpy.diff(kept, prepend=False, append=False)
    return edges[numpy.flatnonzero(changes)].reshape(-1, 2)


def _covered(intervals: Intervals, at: NDArray[numpy.float64]) -> _Mask:
    """Whether each moment lies in an interval: more have begun by then than have ended. Holds where they overlap too."""
    begun = numpy.searchsorted(numpy.sort(intervals[:, 0]), at, side="right")
    ended = numpy.searchsorted(numpy.sort(intervals[:, 1]), at, side="right")
    return begun > ended


def _none() -> Intervals:
    return numpy.empty((0, 2))
