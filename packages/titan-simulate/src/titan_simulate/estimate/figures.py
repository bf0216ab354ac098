"""The time of a simulated step, by what it belongs to. Free of torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titan_simulate.estimate.fusion import fuse
from titan_simulate.estimate.tensor_overlap import overlap_tensor_parallel
from titan_simulate.estimate.timeline import COMMUNICATION, Timeline, issue_seconds, simulate_streams
from titan_simulate.estimate.work import ACTIONS, ALL, BLOCKS, Action, Kind, Work
from titan_simulate.hardware.machine import Machine

if TYPE_CHECKING:
    from titan_simulate.estimate.traced_rank import TracedRank

REPEATED, ONCE = SECTIONS = ("forward and backward of all microbatches", "once per step")


@dataclass(frozen=True)
class Timed:
    """A simulated step in time."""

    trace: list[Work]
    timeline: Timeline
    factors: list[float]
    """For how many of itself in the whole job each operator stands."""


@dataclass(frozen=True)
class Figures:
    """What a step of a rank takes."""

    seconds: float
    sections: dict[str, float]
    """Seconds by :data:`SECTIONS`."""
    kinds: dict[str, float]
    """Seconds by kind of work, and ``host``."""
    collectives: dict[tuple[str, str, int], dict[str, float]]
    """By operator, group and number of ranks."""
    stages: list[dict[str, dict[str, float]]]
    """By stage of this rank: :data:`BLOCKS` and :data:`ALL` -> seconds of one action of each kind."""
    timed: Timed
    """What all this is of."""


def figures_of(
    sample: TracedRank, machine: Machine, scale: float, overlaps: bool, worst: Callable[[Sequence[Work]], list[Work]] = list
) -> Figures:
    """Return the figures of a simulated rank.

    Args:
        scale: microbatches of the job per simulated microbatch, if that is not 1.
        overlaps: whether collectives run beside the matmuls that they belong to.
        worst: returns the trace of the rank that the others wait for.
    """
    trace = fuse(worst(sample.trace))
    if sample.order is not None:  # exchanges between stages are part of the pipeline's simulation
        trace = [
            replace(work, kind=Kind.WAIT) if work.kind in (Kind.SEND, Kind.RECEIVE) else work for work in trace
        ]  # fmt: skip
    if overlaps:
        trace = overlap_tensor_parallel(trace, machine)
    timeline = simulate_streams(trace, machine)
    repeated = per_microbatch(trace, sample.microbatches)
    factors = stands_for(trace, repeated, sample.microbatches, scale)
    deltas, now = list[float](), 0.0
    for interval in timeline.intervals:
        deltas.append(max(0.0, interval.end - now))
        now = max(now, interval.end)
    sections = dict.fromkeys(SECTIONS, 0.0)
    kinds: dict[str, float] = defaultdict(float)
    collectives: dict[tuple[str, str, int], dict[str, float]] = {}
    host = 0.0
    for position, (work, interval, delta, factor) in enumerate(
        zip(trace, timeline.intervals, deltas, factors, strict=True)
    ):  # fmt: skip
        if work.action is None:
            sections[REPEATED if repeated[position] else ONCE] += factor * delta
        host += factor * issue_seconds(work, machine)
        duration = interval.end - interval.start
        kinds[work.kind] += factor * duration
        if work.kind in COMMUNICATION:
            entry = collectives.setdefault(
                (work.name, work.group, len(work.ranks)), dict.fromkeys(("count", "bytes", "seconds", "exposed"), 0.0)
            )
            entry["count"] += factor
            entry["bytes"] += factor * work.bytes
            entry["seconds"] += factor * duration
            entry["exposed"] += factor * timeline.exposed.get(position, 0.0)
    sections[ONCE] += max(0.0, timeline.seconds - now)
    stages, steady, beyond = _actions(sample.parts.kept, trace, deltas)
    sections[REPEATED] += scale * steady
    sections[ONCE] += beyond
    seconds = sum(sections.values())
    kinds["host"] = seconds if machine.host.computes else host
    return Figures(seconds, sections, dict(kinds), collectives, stages, Timed(trace, timeline, factors))


def per_microbatch(trace: Sequence[Work], microbatches: int) -> list[bool]:
    """Return what of a step each microbatch repeats.

    In a pipeline, that is what the actions between the first and the last one of their kind do: the first of a stage may
    gather parameters, and the last may reduce gradients. Without one, it is forward and backward, but not gathers and
    reductions of data parallelism that a step does fewer times than it has microbatches: parameters may stay gathered, and
    gradients may be summed before they are reduced.
    """
    if any(work.action is not None for work in trace):
        middle = middle_actions({work.action for work in trace if work.action is not None})
        return [work.action in middle for work in trace]
    same: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, work in enumerate(trace):
        if work.name.startswith(("c10d::", "fsdp::")):
            same[work.name, work.phase, work.module, work.group, work.bytes].append(position)
    once = {position for positions in same.values() if len(positions) < microbatches for position in positions}
    return [
        work.phase in ("forward", "backward") and position not in once for position, work in enumerate(trace)
    ]  # fmt: skip


def middle_actions(actions: Iterable[Action]) -> set[Action]:
    """Return those of ``actions`` whose stage runs their kind for microbatches before and after; if none is left, all."""
    numbers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for kind, stage, microbatch in actions:
        numbers[kind, stage].append(microbatch)
    return {
        (kind, stage, number) for (kind, stage), of_kind in numbers.items() for number in sorted(of_kind)[1:-1] or of_kind
    }


def stands_for(trace: Sequence[Work], repeated: Sequence[bool], microbatches: int, scale: float) -> list[float]:
    """Return for how many of itself in the whole job each operator stands.

    The first microbatch stands for itself and the following ones for all others: they add gradients to those of the ones
    before. In a pipeline, the last one stands for itself too.

    Args:
        repeated: of :func:`per_microbatch`.
        microbatches: how many ``trace`` has.
        scale: microbatches of the job per microbatch of ``trace``.
    """
    if any(work.action is not None for work in trace):
        ends = 2 if microbatches > 2 else 0
        between = (scale * microbatches - ends) / (microbatches - ends)
        return [between if one else 1.0 for one in repeated]
    number, first, before = -1, "", ("", "")  # a microbatch begins where the first unit computes forward again
    numbers = []
    for work in trace:
        now = work.unit, work.phase
        if now[0]:
            first = first or now[0]
            number += now == (first, "forward") != before
            before = now
        numbers.append(number)
    if number + 1 != microbatches or microbatches < 2:
        return [scale if one else 1.0 for one in repeated]
    following = (scale * microbatches - 1) / (microbatches - 1)
    return [following if one and count > 0 else 1.0 for one, count in zip(repeated, numbers, strict=True)]


def _actions(
    kept: Sequence[Sequence[str]], trace: Sequence[Work], seconds: Sequence[float]
) -> tuple[list[dict[str, dict[str, float]]], float, float]:
    """Return the seconds of an action of each kind, by stage, of the ``seconds`` of each operator; those of all actions that
    ran, if each takes as long as its like; and what the first and the last ones take beyond.

    Args:
        kept: by stage, its blocks.
    """
    ran: set[Action] = {work.action for work in trace if work.action is not None}
    middle = middle_actions(ran)
    numbers = {stage: number for number, stage in enumerate(sorted({stage for _, stage, _ in ran}))}
    found = [{which: dict.fromkeys(ACTIONS, 0.0) for which in (BLOCKS, ALL)} for _ in kept]
    counts = Counter((kind, stage) for kind, stage, _ in middle)
    total = 0.0
    for work, duration in zip(trace, seconds, strict=True):
        if work.action is None:
            continue
        total += duration
        if work.action in middle:
            kind, stage, _ = work.action
            number = numbers[stage]
            share = duration / counts[kind, stage]
            found[number][ALL][kind] += share
            if work.unit in kept[number]:
                found[number][BLOCKS][kind] += share
    steady = sum(found[numbers[stage]][ALL][kind] for kind, stage, _ in ran)
    return found, steady, total - steady
