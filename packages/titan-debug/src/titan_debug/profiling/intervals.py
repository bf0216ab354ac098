"""Sets of times as intervals: arrays of shape ``[n, 2]`` whose rows are half-open intervals ``[start, end)``."""

from __future__ import annotations

from collections.abc import Callable

import numpy
from numpy.typing import NDArray

Intervals = NDArray[numpy.float64]
_Mask = NDArray[numpy.bool_]


def union(one: Intervals, other: Intervals | None = None) -> Intervals:
    """Return the union of ``one`` and ``other`` as sorted, disjoint intervals."""
    return _select(one, _none() if other is None else other, numpy.logical_or)


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of ``one`` and ``other`` as sorted, disjoint intervals."""
    return _select(one, other, numpy.logical_and)


def difference(one: Intervals, other: Intervals) -> Intervals:
    """Return ``one`` without ``other`` as sorted, disjoint intervals."""
    return _select(one, other, lambda in_one, in_other: in_one & ~in_other)


def length(intervals: Intervals) -> float:
    """Return the total length of the union."""
    merged = union(intervals)
    return float((merged[:, 1] - merged[:, 0]).sum())


def _select(one: Intervals, other: Intervals, keep: Callable[[_Mask, _Mask], _Mask]) -> Intervals:
    """Select pieces by their membership in ``one`` and ``other``. A piece lies between two neighbouring edges of all
    intervals, so membership is constant within it."""
    edges = numpy.unique(numpy.concatenate([one.ravel(), other.ravel()]))
    kept = keep(_covered(one, edges[:-1]), _covered(other, edges[:-1]))
    # The start and end of each run of selected pieces.
    changes = numpy.diff(kept, prepend=False, append=False)
    return edges[numpy.flatnonzero(changes)].reshape(-1, 2)


def _covered(intervals: Intervals, at: NDArray[numpy.float64]) -> _Mask:
    """Return whether each time lies in an interval: more intervals have begun by then than have ended. Intervals may
    overlap."""
    begun = numpy.searchsorted(numpy.sort(intervals[:, 0]), at, side="right")
    ended = numpy.searchsorted(numpy.sort(intervals[:, 1]), at, side="right")
    return begun > ended


def _none() -> Intervals:
    return numpy.empty((0, 2))
