"""Times of a step's operators: streams, waits, the host, and contention between operators. Free of torch.

An operator starts when the one before on its stream has ended, what it waits for has ended, and the host has issued it. The
host issues nothing while it reads values from the device, so what follows finds the device idle. A collective also waits for
the one before on its communicator, which NCCL runs one at a time. Communication of different groups shares the bandwidth of
the links that it has in common, and keeps multiprocessors from computation.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from titan_simulate.estimate.on_host import run_on_host
from titan_simulate.estimate.roofline import link_shares, seconds_of
from titan_simulate.estimate.work import Interval, Kind, Work
from titan_simulate.hardware.machine import Machine

COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)
COMPUTATION = (Kind.MATMUL, Kind.ATTENTION, Kind.POINTWISE)
"""What multiprocessors do."""


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
    issued: list[float] = []
    host = 0.0
    for work in trace:
        host += issue_seconds(work, machine)
        issued.append(host)
        if work.kind is Kind.HOST_WAIT:
            host = 0.0
    durations = [max(0.0, seconds_of(work, machine) - work.hidden_seconds) for work in trace]
    kinds: dict[Kind, float] = defaultdict(float)
    for work, duration in zip(trace, durations, strict=True):
        kinds[work.kind] += duration
    intervals = _Device(trace, machine).run(issued, durations)
    end, host = max((one.end for one in intervals), default=0.0), issued[-1] if issued else 0.0
    return Timeline(max(end, host), intervals, dict(kinds), _exposed(trace, intervals), host)


def issue_seconds(work: Work, machine: Machine) -> float:
    """Return the time in which the host issues ``work``."""
    if work.kind is Kind.WAIT or work.graphed:
        return 0.0
    return 1e-6 * work.times * (machine.host.compiled_kernel_us if work.compiled else machine.host.operator_us)


def slowdown(machine: Machine) -> float:
    """Return the share of its speed that computation loses beside communication."""
    most = max(machine.multiprocessors, machine.links.multiprocessors + 1)
    return min(0.9, machine.links.multiprocessors / most)


class _Device:
    """Runs a trace: from one start or end of an operator to the next, in between which all run at constant rates."""

    def __init__(self, trace: Sequence[Work], machine: Machine) -> None:
        self._trace = trace
        self._slower = 1.0 - slowdown(machine)
        self._shares = {
            position: link_shares(work, machine) for position, work in enumerate(trace) if work.kind in COMMUNICATION
        }

    def run(self, issued: list[float], durations: Sequence[float]) -> list[Interval]:
        """Return when each operator runs.

        Args:
            issued: when the host has issued each; after a wait of the host, since it ended, which is added to it.
            durations: seconds of each when nothing else runs.
        """
        missing, following = _order(self._trace)
        waits = [position for position, work in enumerate(self._trace) if work.kind is Kind.HOST_WAIT]
        unissued = {wait: range(wait + 1, last + 1) for wait, last in pairwise([*waits, len(missing) - 1])}
        for held in unissued.values():
            for position in held:
                missing[position] += 1
        intervals = [Interval(0.0, 0.0) for _ in self._trace]
        ready = [(issued[position], position) for position, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        left: dict[int, float] = {}  # running operator -> seconds that it still needs when nothing else runs
        now = 0.0
        while ready or left:
            rates = self._rates(left)
            first = min(left, key=lambda position: left[position] / rates[position], default=None)
            end = None if first is None else now + left[first] / rates[first]
            if first is None or end is None or (ready and ready[0][0] < end):
                until, position = heapq.heappop(ready)
                until = max(now, until)
                ended = None if durations[position] else position
            else:
                until, position, ended = end, first, first
            for running in left:
                left[running] = max(0.0, left[running] - (until - now) * rates[running])
            now = until
            if position not in left:
                intervals[position].start = now
                left[position] = durations[position]
            if ended is None:
                continue
            del left[ended]
            intervals[ended].end = now
            held = unissued.get(ended, range(0))
            for position in held:
                issued[position] += now
            for after in (*held, *following[ended]):
                missing[after] -= 1
                if not missing[after]:
                    heapq.heappush(ready, (max(now, issued[after]), after))
        return intervals

    def _rates(self, running: Mapping[int, float]) -> dict[int, float]:
        """Return how fast each operator runs, as a share of what it reaches alone."""
        used: dict[str, float] = defaultdict(float)
        communicates = False
        for position in running:
            for link, share in self._shares.get(position, {}).items():
                used[link] += share
            communicates |= position in self._shares
        found = {}
        for position in running:
            shares = self._shares.get(position)
            if shares is not None:
                found[position] = 1.0 / max((1.0, *(used[link] for link in shares)))
            else:
                slows = communicates and self._trace[position].kind in COMPUTATION
                found[position] = self._slower if slows else 1.0
        return found


def _order(trace: Sequence[Work]) -> tuple[list[int], list[list[int]]]:
    """Return for each operator how many others it waits for, and those that wait for it."""
    missing, following = [0] * len(trace), [list[int]() for _ in trace]
    last: dict[tuple[object, ...], int] = {}
    for position, work in enumerate(trace):
        queues: list[tuple[object, ...]] = [("stream", work.stream)]
        if work.kind is Kind.COLLECTIVE:
            queues.append(("communicator", work.group, work.ranks))
        before = {*work.after, *(last[queue] for queue in queues if queue in last)}
        last |= dict.fromkeys(queues, position)
        missing[position] = len(before)
        for one in before:
            following[one].append(position)
    return missing, following


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
