"""The allocations of a pipeline with many microbatches, from those of one with few. Free of torch.

Each action of the whole schedule makes what an action made that was simulated: of the first microbatch, of the last one, or
of one between. It is freed in the action of its own microbatch that frees it in the simulation. What another microbatch
frees there, such as a tensor that has been sent, is freed as many actions later as there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from titan_simulate.engine.allocator import Event
from titan_simulate.engine.result import AllocationTrace, Label
from titan_simulate.estimate.work import Action

BETWEEN = 1
"""The simulated microbatch that stands for those between the first and the last one."""


class _Simulated:
    """A trace by action. What is made between two actions belongs to the second one, which receives it; what is freed there
    belongs to the first one, which has sent it."""

    def __init__(self, trace: AllocationTrace) -> None:
        begins, ends = ([position for position, _ in trace.marks[which::2]] for which in (0, 1))
        self.start = max(position for position, name in trace.moments if name == "forward" and position <= begins[0])
        self.end = ends[-1]
        self.actions: list[Action] = [action for _, action in trace.marks[::2]]
        self.spans = [range(*span) for span in zip([self.start, *ends[:-1]], ends, strict=True)]
        self.made_at = {number: position for position, (number, size, _) in enumerate(trace.events) if size}
        self.freed_at = {number: position for position, (number, size, _) in enumerate(trace.events) if not size}
        self.last = max(microbatch for _, _, microbatch in self.actions)
        self._begins, self._ends, self._trace = begins, ends, trace

    def freer(self, number: int, maker: int) -> tuple[int, int, int] | None:
        """Return which action frees an allocation that action ``maker`` makes, at which position, and how many events after
        its end; ``None`` if what follows the last action does."""
        position = self.freed_at.get(number, self.end)
        if position >= self.end:
            return None
        found = max(maker, bisect_right(self._begins, position) - 1)
        return found, position, max(0, position - self._ends[found] + 1)

    def as_late(self, position: int, freer: int, other: int) -> int:
        """Return the position in another action that is as far from its end as ``position`` is from that of ``freer``."""
        return max(self.spans[other].start, self.spans[other].stop - (self._ends[freer] - position))

    def moments(self, action: int) -> list[tuple[int, str]]:
        """Return where phases begin in an action. The one that runs when it begins is the first."""
        span, all_moments = self.spans[action], self._trace.moments
        within = [one for one in all_moments if one[0] in span]
        running = [name for position, name in all_moments if position < span.start]
        return within if within and within[0][0] == span.start else [(span.start, running[-1]), *within]


class _Whole:
    """The actions of the whole schedule, and which simulated ones they are like."""

    def __init__(self, actions: Sequence[Action], simulated: _Simulated) -> None:
        self.actions = actions
        stages, ran = (sorted({stage for _, stage, _ in some}) for some in (actions, simulated.actions))
        self._number = {action: number for number, action in enumerate(actions)}
        self._last = max(microbatch for _, _, microbatch in actions)
        self._simulated, self._place = simulated, {action: number for number, action in enumerate(simulated.actions)}
        self._stage_there, self._stage_here = dict(zip(stages, ran, strict=True)), dict(zip(ran, stages, strict=True))

    def like(self, number: int) -> int:
        """Return the simulated action that action ``number`` is like."""
        kind, stage, microbatch = self.actions[number]
        there = 0 if microbatch == 0 else self._simulated.last if microbatch == self._last else BETWEEN
        return self._place[kind, self._stage_there[stage], there]

    def when_freed(self, number: int, maker: int, freer: int) -> tuple[int, bool]:
        """Return the action that frees what action ``number`` makes, as ``freer`` frees what ``maker`` makes in the
        simulation, and whether it is like ``freer``."""
        kind, there, microbatch = self._simulated.actions[freer]
        stage, own = self._stage_here[there], self._simulated.actions[maker][2]
        if microbatch == own:
            return self._number[kind, stage, self.actions[number][2]], True
        if {microbatch, own} == {0, self._simulated.last}:  # such as gradients, which the last action of a stage reduces
            found = self._number[kind, stage, self._last if microbatch else 0]
            if found > number:
                return found, True
        return min(number + freer - maker, len(self.actions) - 1), False


def unroll_actions(trace: AllocationTrace, actions: Sequence[Action]) -> AllocationTrace:
    """Return the allocations of a rank that runs ``actions`` in place of those whose beginnings and ends are marked in
    ``trace``."""
    simulated = _Simulated(trace)
    whole = _Whole(actions, simulated)
    # (number of an action, position in the simulation), so that sorting gives the order in which things happen.
    events: list[tuple[int, int, Event]] = []
    moments: list[tuple[int, int, str]] = []
    labels = list(trace.labels)
    freed: set[int] = set()  # what was made before the first action
    kept: dict[int, list[int]] = defaultdict(list)  # what the step's end frees -> all that is like it
    for number in range(len(actions)):
        own = whole.like(number)
        moments += ((number, position, name) for position, name in simulated.moments(own))
        for position in simulated.spans[own]:
            one, size, stream = event = trace.events[position]
            if not size:
                if simulated.made_at[one] < simulated.start and one not in freed:
                    freed.add(one)
                    events.append((number, position, event))
                continue
            labels.append(labels[one - 1])
            new = len(labels)
            events.append((number, position, (new, size, stream)))
            found = simulated.freer(one, own)
            if found is None:
                kept[one].append(new)
                continue
            freer, at, after = found
            when, alike = whole.when_freed(number, own, freer)
            if after:
                at = simulated.end + after
            elif not alike:
                at = simulated.as_late(at, freer, whole.like(when))
            events.append((when, max(at, position) if when == number else at, (new, 0, 0)))
    events.sort(key=lambda one: one[:2])
    moments.sort(key=lambda one: one[:2])
    return _joined(trace, simulated, events, moments, kept, freed, labels)


def _joined(
    trace: AllocationTrace,
    simulated: _Simulated,
    events: Sequence[tuple[int, int, Event]],
    moments: Sequence[tuple[int, int, str]],
    kept: Mapping[int, Sequence[int]],
    freed: Collection[int],
    labels: Sequence[Label],
) -> AllocationTrace:
    """Return what happens before the actions, the actions, and what happens after them."""
    start, places = simulated.start, [one[:2] for one in events]
    names = [one for one in trace.moments if one[0] < start]
    names += ((start + bisect_left(places, one[:2]), one[2]) for one in moments)
    found = [*trace.events[:start], *(event for _, _, event in events)]
    for position in range(simulated.end, len(trace.events) + 1):
        names += ((len(found), name) for other, name in trace.moments if other == position)
        if position < len(trace.events):
            one, size, stream = trace.events[position]
            if start <= simulated.made_at[one] < simulated.end:
                found += ((new, size, stream) for new in kept.get(one, ()))
            elif size or one not in freed:
                found.append((one, size, stream))
    changes = [one for number, one in enumerate(names) if not number or one[1] != names[number - 1][1]]
    return AllocationTrace(tuple(found), tuple(changes), labels=tuple(labels))


def peaks_by_moment(trace: AllocationTrace) -> dict[str, Counter[Label]]:
    """Return what is in use at the peak of each moment, by label."""
    names = dict(trace.moments)
    now, level = "start", 0
    best: dict[str, tuple[int, int]] = {}  # moment -> bytes, and position of the event that needs them
    alive: dict[int, int] = {}
    for position, (number, size, _) in enumerate(trace.events):
        now = names.get(position, now)
        if size:
            alive[number] = size
        level += size or -alive.pop(number)
        best[now] = max(best.get(now, (0, 0)), (level, position))
    wanted: dict[int, list[str]] = defaultdict(list)
    for moment, (_, position) in best.items():
        wanted[position].append(moment)
    found: dict[str, Counter[Label]] = {}
    in_use: Counter[Label] = Counter()
    for position, (number, size, _) in enumerate(trace.events):
        label = trace.labels[number - 1]
        if size:
            alive[number] = size
        in_use[label] += size or -alive.pop(number)
        found |= {moment: in_use.copy() for moment in wanted.get(position, ())}
    return found
