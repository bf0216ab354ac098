"""Explains the time and the memory of an estimate, by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from titan_simulate.estimate.estimate import GIB, Details, Estimate, Extended, together
from titan_simulate.estimate.figures import Figures, middle_actions
from titan_simulate.estimate.pipeline import Order
from titan_simulate.estimate.reserved import workspaces_of
from titan_simulate.estimate.spans import EXPOSED, spans
from titan_simulate.estimate.timeline import COMMUNICATION
from titan_simulate.estimate.work import Kind
from titan_simulate.hardware.machine import Machine

IDLE, RECOMPUTATION = "pipeline idle", "recomputation"
_NO_MODULE = together("")
_ROUNDING = 1e-12
"""Seconds that are no row."""
_TimeKey = tuple[str, tuple[str, str, str]]
"""Module; phase, kind of work and group."""
_CollectiveKey = tuple[str, tuple[str, str, int]]
"""Module; operator, group and number of ranks."""
_Times = dict[_TimeKey, float]
Rest = TypeVar("Rest")


@dataclass(frozen=True)
class TimeRow:
    """Seconds of a step in which a module does one kind of work, and nothing that counts before it."""

    module: str
    """Blocks together; ``"-"`` outside of modules."""
    phase: str
    kind: str
    """See :mod:`titan_simulate.estimate.spans`; or :data:`IDLE`."""
    group: str
    """Of exposed communication; otherwise ``""``."""
    seconds: float


@dataclass(frozen=True)
class CollectiveRow:
    """Calls of one collective by one module in one step."""

    module: str
    operator: str
    group: str
    ranks: int
    calls: float
    gib: float
    """Sum over the calls of the larger of input and output."""
    seconds: float
    exposed_seconds: float
    """Of these, seconds in which nothing computes."""


@dataclass(frozen=True)
class MemoryRow:
    """Memory at the peak that belongs to one module."""

    module: str
    owner: str
    gib: float


@dataclass(frozen=True)
class Explanation:
    """Rows, the largest first."""

    rank: int
    """The rank whose time this is: of a pipeline, that of its first and its last rank that has more to do."""
    time: tuple[TimeRow, ...]
    """Sum up to ``step_seconds``."""
    collectives: tuple[CollectiveRow, ...]
    """Of the rank that needs most memory, as in the estimate."""
    memory: tuple[MemoryRow, ...]
    """Sum up to ``peak_gib``."""


def explain(found: Estimate, details: Details) -> Explanation:
    """Return where the figures of ``found`` come from."""
    rank, times = _slowest(details)
    if details.after_update:
        times[_NO_MODULE, ("after the update", str(Kind.POINTWISE), "")] += details.after_update
    if details.pipeline is not None:  # for other ranks
        times[_NO_MODULE, ("pipeline", IDLE, "")] += found.step_seconds - sum(times.values())
    rows = (TimeRow(module, *what, seconds) for (module, what), seconds in times.items() if abs(seconds) > _ROUNDING)
    return Explanation(
        rank=rank,
        time=tuple(sorted(rows, key=lambda row: -row.seconds)),
        collectives=_collectives(details.largest),
        memory=_memory(details.largest, details.machine),
    )


def _slowest(details: Details) -> tuple[int, _Times]:
    """Return the rank that has most to do, and its seconds."""
    ranks = list(details.ranks.values())
    if details.pipeline is None:
        ranks = ranks[:1]
    found = [(one.rank, _times(one, last=number > 0)) for number, one in enumerate(ranks)]
    return max(found, key=lambda one: sum(one[1].values()))


def _times(one: Extended, last: bool) -> _Times:
    """Return seconds of all blocks, extended as those of the estimate are: what a stage repeats, by its own blocks."""
    (once, stages), (more_once, more_stages) = (times_of(figures, one.order, last) for figures in one.figures)
    found = extended(once, more_once, one.extend, _blocks(one))
    for number, (few, more) in enumerate(zip(stages, more_stages, strict=True)):
        of_stage = extended(few, more, partial(one.extend_part, number=number), _blocks(one))
        for key, seconds in of_stage.items():
            found[key] += seconds
    return found


def _blocks(one: Extended) -> str:
    """Return the name of all blocks: ``"layers.*"``."""
    return together(next((name for kept in one.samples[-1].parts.kept for name in kept), ""))


def extended(
    few: Mapping[tuple[str, Rest], float],
    more: Mapping[tuple[str, Rest], float],
    extend: Callable[[float, float], float],
    blocks: str,
) -> dict[tuple[str, Rest], float]:
    """Extend the figures of modules. What further blocks add to those of a module outside of the blocks, such as a wait for
    their communication, counts for the blocks."""
    found: dict[tuple[str, Rest], float] = defaultdict(float)
    for module, what in {**few, **more}:
        largest = more.get((module, what), 0.0)
        value = extend(few.get((module, what), 0.0), largest)
        if "*" not in module and module != _NO_MODULE:
            found[blocks, what] += value - largest
            value = largest
        found[module, what] += value
    return found


def times_of(figures: Figures, order: Order | None, last: bool) -> tuple[_Times, list[_Times]]:
    """Return the seconds of a simulated rank: of what happens once per step, or what factors multiply; and, in a pipeline,
    of all actions of each of its stages, which take as long as those between the first and the last one of their kind."""
    timed = figures.timed
    ran = {work.action for work in timed.trace if work.action is not None}
    middle = middle_actions(ran)
    counts, repeated = (Counter((kind, stage) for kind, stage, _ in some) for some in (middle, ran))
    simulated = sorted({stage for _, stage, _ in ran})
    along = 0 if order is None else max(order.stages) if last else order.stages[0]
    whole = Counter((kind, stage) for kind, stage, _ in (() if order is None else order.actions[along]))
    stages_there = [stage for stage, rank in enumerate(() if order is None else order.stages) if rank == along]
    once: _Times = defaultdict(float)
    stages: list[_Times] = [defaultdict(float) for _ in figures.stages]
    for span in spans(timed.trace, timed.timeline.intervals, timed.timeline.seconds):
        work = timed.trace[span.running]
        key = (
            together(work.module),
            (RECOMPUTATION if work.recomputed else work.phase, span.kind, work.group if span.kind == EXPOSED else ""),
        )
        action = None if span.counted is None else timed.trace[span.counted].action
        if action is None:
            once[key] += span.seconds * (1.0 if span.counted is None else timed.factors[span.counted])
            continue
        once[key] += span.seconds
        if action in middle:
            kind, stage, _ = action
            number = simulated.index(stage)
            one = span.seconds / counts[kind, stage]
            once[key] -= one * repeated[kind, stage]
            stages[number][key] += one * whole[kind, stages_there[number]]
    return once, stages


def _collectives(one: Extended) -> tuple[CollectiveRow, ...]:
    few, more = map(_collectives_of, one.figures)
    columns = [extended(less, most, one.extend, _blocks(one)) for less, most in zip(few, more, strict=True)]
    rows = [CollectiveRow(key[0], *key[1], *(column.get(key, 0.0) for column in columns)) for key in columns[0]]
    known = (row for row in rows if max(row.calls, row.seconds, abs(row.exposed_seconds)) > _ROUNDING)
    return tuple(sorted(known, key=lambda row: -row.seconds))


def _collectives_of(figures: Figures) -> list[dict[_CollectiveKey, float]]:
    """Return calls, GiB, seconds and exposed seconds."""
    columns: list[dict[_CollectiveKey, float]] = [defaultdict(float) for _ in range(4)]
    timed, exposed = figures.timed, figures.timed.timeline.exposed
    for position, work in enumerate(timed.trace):
        if work.kind in COMMUNICATION:
            interval = timed.timeline.intervals[position]
            key = together(work.module), (work.name, work.group, len(work.ranks))
            values = 1.0, work.bytes / GIB, interval.end - interval.start, exposed.get(position, 0.0)
            for column, value in zip(columns, values, strict=True):
                column[key] += timed.factors[position] * value
    return columns


def _memory(one: Extended, machine: Machine) -> tuple[MemoryRow, ...]:
    workspaces = 0
    if machine.allocator.caching:
        workspaces = sum(size for _, size, _ in workspaces_of(one.samples[-1].found.allocations, machine))
    context = machine.context_gib * GIB
    sizes: dict[tuple[str, str], float] = {(str(owner), module): size for (owner, module), size in one.sizes.items()}
    sizes |= {
        ("workspaces of cuBLAS", _NO_MODULE): workspaces,
        ("allocator, rounding", _NO_MODULE): one.need.allocated - one.bytes - workspaces,
        ("allocator, idle", _NO_MODULE): one.need.idle,
        ("context of CUDA", _NO_MODULE): context,
        ("communicators", _NO_MODULE): one.need.outside - context,
    }
    rows = (MemoryRow(module, owner, size / GIB) for (owner, module), size in sizes.items() if size)
    return tuple(sorted(rows, key=lambda row: -row.gib))
