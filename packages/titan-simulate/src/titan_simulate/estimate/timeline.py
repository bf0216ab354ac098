"""When each operator of a step runs: streams, waits, the host, and what communication takes from computation. Free of torch.

Operators start in the order in which the host issues them: when the one before on their stream has ended, what they wait for
has ended, and the host has issued them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_simulate.estimate.on_host import run_on_host
from titan_simulate.estimate.roofline import seconds_of
from titan_simulate.estimate.work import Interval, Kind, Work
from titan_simulate.hardware.machine import Machine

COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)


@dataclass
class Timeline:
    """A step in time."""

    seconds: float
    """Until the last operator ends."""
    intervals: list[Interval]
    """Of each operator of the trace."""
    by_kind: dict[Kind, float] = field(default_factory=dict)
    """Seconds of device time by kind, overlapping or not."""
    exposed: dict[int, float] = field(default_factory=dict)
    """Position of a collective -> seconds of it during which nothing computes."""
    host: float = 0.0
    """When the host has issued everything: a lower bound of the step."""


def simulate_streams(trace: Sequence[Work], machine: Machine) -> Timeline:
    """Return when each operator of ``trace`` runs on ``machine``."""
    if machine.host.computes:
        done, by_kind = run_on_host(trace, machine)
        last = max((one.end for one in done), default=0.0)
        return Timeline(last, done, by_kind, _exposed(trace, done), last)
    free: dict[str, float] = defaultdict(float)
    intervals: list[Interval] = []
    busy: list[tuple[float, float]] = []  # communication, by start
    kinds: dict[Kind, float] = defaultdict(float)
    taken = min(0.9, machine.links.multiprocessors / max(machine.multiprocessors, machine.links.multiprocessors + 1))
    host = 0.0
    for work in trace:
        if work.kind is not Kind.WAIT:
            step = machine.host.compiled_kernel_us if work.compiled and work.name == "fused" else machine.host.operator_us
            host += step * 1e-6
        start = max([free[work.stream], host, *(intervals[one].end for one in work.after)])
        duration = seconds_of(work, machine)
        kinds[work.kind] += duration
        if work.kind in COMMUNICATION:
            busy.append((start, start + duration))
            busy.sort()
        elif duration and busy and taken:
            duration = _slowed(start, duration, busy, taken)
        free[work.stream] = start + duration
        intervals.append(Interval(start, start + duration))
    end = max((one.end for one in intervals), default=0.0)
    return Timeline(max(end, host), intervals, dict(kinds), _exposed(trace, intervals), host)


def _slowed(start: float, duration: float, busy: list[tuple[float, float]], taken: float) -> float:
    """Return the duration of a computation that has fewer multiprocessors while communication runs."""
    now, left = start, duration
    number = max(0, bisect_left(busy, (start, 0.0)) - 8)
    while left > 0:
        while number < len(busy) and busy[number][1] <= now:
            number += 1
        if number == len(busy) or busy[number][0] >= now + left:
            return now + left - start
        begin, end = busy[number]
        if begin > now:
            left -= begin - now
            now = begin
        possible = (end - now) * (1 - taken)
        if possible >= left:
            return now + left / (1 - taken) - start
        left -= possible
        now = end
    return now - start


def _exposed(trace: Sequence[Work], intervals: Sequence[Interval]) -> dict[int, float]:
    computing = _union(
        [
            (one.start, one.end)
            for work, one in zip(trace, intervals, strict=True)
            if work.kind not in COMMUNICATION and one.end > one.start
        ]
    )
    found = {}
    starts = [start for start, _ in computing]
    for position, (work, one) in enumerate(zip(trace, intervals, strict=True)):
        if work.kind in COMMUNICATION and one.end > one.start:
            covered = 0.0
            for start, end in computing[max(0, bisect_left(starts, one.start) - 1) :]:
                if start >= one.end:
                    break
                covered += max(0.0, min(end, one.end) - max(start, one.start))
            found[position] = one.end - one.start - covered
    return found


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
