"""Attributes each instant of a step. Free of torch.

Operators overlap, so their durations do not sum up to the step. Here each instant belongs to one of them, or to several of a
kind in equal shares: to what computes; otherwise, to copies between device and host; otherwise, to communication, which is
then exposed; and if nothing runs, to the host, which has yet to issue the operator that runs next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from titan_simulate.estimate.timeline import COMMUNICATION, COMPUTATION
from titan_simulate.estimate.work import Interval, Kind, Work

EXPOSED, HOST = "exposed communication", "host"
_ON_HOST = (Kind.HOST, Kind.HOST_WAIT)


class Span(NamedTuple):
    """A stretch of a step in which one operator runs, or its share of one in which several do."""

    counted: int | None
    """Position in the trace of the operator for which :mod:`~titan_simulate.estimate.figures` counts the time: the first one
    that ends after it. ``None`` after the end of the last one."""
    running: int
    """Position of the operator to which it belongs."""
    kind: str
    """Of work: a :class:`~titan_simulate.estimate.work.Kind` that computes or copies, :data:`EXPOSED` or :data:`HOST`."""
    seconds: float


def spans(trace: Sequence[Work], intervals: Sequence[Interval], end: float) -> Iterator[Span]:
    """Yield the spans of a step, whose ``seconds`` sum up to ``end``.

    Args:
        intervals: when each operator of ``trace`` runs.
        end: when the step ends: no earlier than its last operator.
    """
    if not trace:
        return
    now, counted = 0.0, list[tuple[float, int | None]]()
    for position, one in enumerate(intervals):
        if one.end > now:
            now = one.end
            counted.append((now, position))
    counted.append((end, None))
    runs = [position for position, one in enumerate(intervals) if one.end > one.start]
    starts = sorted(runs, key=lambda position: (intervals[position].start, position))
    cuts = {0.0, end, *(when for when, _ in counted)}
    cuts |= {when for position in runs for when in (intervals[position].start, intervals[position].end)}
    running: list[set[int]] = [set(), set(), set()]  # what computes, what copies, what communicates
    started = of = 0
    for begin, until in pairwise(sorted(cuts)):
        for positions in running:
            positions.difference_update([one for one in positions if intervals[one].end <= begin])
        while started < len(starts) and intervals[starts[started]].start <= begin:
            running[_rank(trace[starts[started]])].add(starts[started])
            started += 1
        while counted[of][0] <= begin:
            of += 1
        found = next(filter(None, running), None)
        if found is None:
            next_one = starts[started] if started < len(starts) else len(trace) - 1
            yield Span(counted[of][1], next_one, HOST, until - begin)
            continue
        for position in found:
            yield Span(counted[of][1], position, _kind_of(trace[position]), (until - begin) / len(found))


def _rank(work: Work) -> int:
    return 0 if work.kind in COMPUTATION else 2 if work.kind in COMMUNICATION else 1


def _kind_of(work: Work) -> str:
    if work.kind in COMMUNICATION:
        return EXPOSED
    return HOST if work.kind in _ON_HOST else str(work.kind)
