"""The allocations of a whole model, from those of a model with few blocks. Free of torch.

A simulation with three blocks per part of the model has one that is neither the first nor the last. What is allocated and
freed while it computes is repeated for all the blocks that it stands for: forward in their order, and backward in the
reverse. Memory that passes from a block to the next one, such as hidden states, is freed there. What is allocated outside of
blocks, such as parameters, is repeated as often as a simulation with a block less lacks it, and grows as it does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from titan_simulate.engine.allocator import Event
from titan_simulate.engine.result import AllocationTrace

FIRST, MIDDLE, LAST = 0, 1, 2
_PLACES = {"first": FIRST, "middle": MIDDLE, "last": LAST}


class CannotUnroll(Exception):
    """The blocks do not repeat."""


@dataclass(frozen=True)
class _Segment:
    """A stretch of a trace."""

    name: str
    start: int
    part: int | None = None
    """The part of the model, if one of its blocks computes."""
    place: int = FIRST
    """Of that block."""
    run: int = 0
    """Number of the pass through the blocks."""

    @property
    def backward(self) -> bool:
        return self.name.startswith("backward")


_Key = tuple[int, int, int]
"""When an event happens: number of its segment, of the copy, position in the trace."""


@dataclass(frozen=True)
class _Life:
    """From an allocation to its end."""

    size: int
    stream: int
    born: int
    died: int | None


def unroll(few: AllocationTrace, more: AllocationTrace, copies: Sequence[int]) -> list[Event]:
    """Return the allocations and frees of a model with more blocks.

    Args:
        few: of a simulation with two blocks per part.
        more: of one with three.
        copies: by part of the model, how many blocks the one in the middle stands for; 0 if ``more`` has no block more of
            it than ``few``.

    Raises:
        CannotUnroll: the blocks do not repeat.
    """
    whole = _Trace(more)
    lives: list[tuple[_Key, _Key | None, _Life]] = []
    passing: dict[tuple[int, int, int, int], tuple[list[_Life], list[_Life]]] = defaultdict(lambda: ([], []))
    for life in whole.lives:
        born, died = whole.segment(life.born), whole.segment(life.died)
        places = [one.place for one in (born, died) if one.part is not None]
        if not places:
            continue
        if MIDDLE not in places:
            lives.append(whole.copy(life, 0, 0))
        elif born.part is not None and born.part == died.part and born.place != died.place:
            # Between neighbours, in the order of the model or against it: to the middle, or from it.
            chain = passing[born.part, born.run, died.run, died.place - born.place]
            chain[born.place == MIDDLE].append(life)
        else:
            part = born.part if born.part is not None and born.place == MIDDLE else died.part
            assert part is not None
            lives += (whole.copy(life, one, one) for one in range(1, copies[part] + 1))
    for (part, _, _, step), (to, of) in passing.items():
        lives += _chained(whole, sorted(to, key=_born), sorted(of, key=_born), copies[part], step)
    lives += _outside(_Trace(few), whole, copies)
    events: list[tuple[_Key, Event]] = []
    for number, (start, end, life) in enumerate(lives, 1):
        events.append((start, (number, life.size, life.stream)))
        if end is not None:
            if end <= start:
                raise CannotUnroll
            events.append((end, (number, 0, 0)))
    events.sort()
    return [event for _, event in events]


def _born(life: _Life) -> int:
    return life.born


def _chained(
    whole: _Trace, to: list[_Life], of: list[_Life], copies: int, step: int
) -> list[tuple[_Key, _Key | None, _Life]]:
    """Return what passes along a chain of blocks: from the first to a copy, from copy to copy, from a copy to the last."""
    nearest, farthest = (1, copies) if step > 0 else (copies, 1)
    found = [whole.copy(life, 0, nearest) for life in to] + [whole.copy(life, farthest, 0) for life in of]
    arriving: dict[int, list[_Life]] = defaultdict(list)
    for life in to:
        arriving[life.size].append(life)
    for life in of:
        assert life.died is not None
        same = arriving[life.size].pop(0).died if arriving[life.size] else None
        for one in range(1, copies):
            start, end = (one, one + 1) if step > 0 else (one + 1, one)
            # Without a counterpart, the first block's own was freed just before its successor began.
            died = whole.beginning(life.died, end) if same is None else whole.key(same, end)
            found.append((whole.key(life.born, start), died, life))
    return found


def _outside(few: _Trace, more: _Trace, copies: Sequence[int]) -> list[tuple[_Key, _Key | None, _Life]]:
    """Return what is allocated and freed outside of blocks."""
    growing = [count for count in copies if count]
    # A block that the larger simulation has more stands for this many others, on average over the parts.
    further = Fraction(sum(count - 1 for count in growing), max(1, len(growing)))
    found: list[tuple[_Key, _Key | None, _Life]] = []
    known = few.outside()
    for key, group in more.outside().items():
        less = known.get(key, [])
        missing = Counter(life.size for life in less) - Counter(life.size for life in group)
        new = Counter(life.size for life in group) - Counter(life.size for life in less)
        grown = sorted(missing.elements())
        owed = dict.fromkeys(new, Fraction(0))  # by size: parts have different numbers of blocks, so only sums are whole
        for life in group:
            count = 1
            if new[life.size]:
                new[life.size] -= 1
                if grown:  # as many as before, but larger: they hold something of every block
                    size = round(life.size + further * (life.size - grown.pop(0)))
                    life = replace(life, size=max(1, size))
                else:
                    owed[life.size] += further
                    count += math.floor(owed[life.size])
                    owed[life.size] %= 1
            found += [more.copy(life, 0, 0)] * count
    return found


class _Trace:
    """A trace, divided into segments."""

    def __init__(self, trace: AllocationTrace) -> None:
        self._segments = _segments(trace)
        self._starts = [one.start for one in self._segments]
        born: dict[int, tuple[int, int, int]] = {}
        self.lives: list[_Life] = []
        for position, (number, size, stream) in enumerate(trace.events):
            if size:
                born[number] = position, size, stream
            else:
                start, size, stream = born.pop(number)
                self.lives.append(_Life(size, stream, start, position))
        self.lives += [_Life(size, stream, start, None) for start, size, stream in born.values()]
        self._end = _Segment("end", len(trace.events))

    def outside(self) -> dict[tuple[str, str, int], list[_Life]]:
        """Return what is allocated and freed outside of blocks, by where that is and by stream."""
        found: dict[tuple[str, str, int], list[_Life]] = defaultdict(list)
        for life in sorted(self.lives, key=_born):
            born, died = self.segment(life.born), self.segment(life.died)
            if born.part is None and died.part is None:
                found[born.name, died.name, life.stream].append(life)
        return found

    def _number(self, position: int) -> int:
        return bisect_right(self._starts, position) - 1

    def segment(self, position: int | None) -> _Segment:
        """Return the segment of an event; of no event, the end."""
        return self._end if position is None else self._segments[self._number(position)]

    def beginning(self, position: int, copy: int) -> _Key:
        """Return when a copy of the block in the middle begins, in the pass to which an event belongs.

        Raises:
            CannotUnroll: it computes nothing in that pass.
        """
        own = self.segment(position)
        for number, one in enumerate(self._segments):
            if (one.part, one.run, one.place) == (own.part, own.run, MIDDLE):
                return number, -copy if one.backward else copy, one.start - 1
        raise CannotUnroll

    def key(self, position: int, copy: int = 0) -> _Key:
        number = self._number(position)
        one = self._segments[number]
        if one.part is None or one.place != MIDDLE:
            copy = 0
        return number, -copy if one.backward else copy, position

    def copy(self, life: _Life, start: int, end: int) -> tuple[_Key, _Key | None, _Life]:
        return self.key(life.born, start), None if life.died is None else self.key(life.died, end), life


_Place = tuple[str, int, int]
"""Direction, part, and place in it, of a block that computes."""


def _segments(trace: AllocationTrace) -> list[_Segment]:
    """Divide a trace at the borders of blocks. What computes between two blocks of a pass belongs to the first of them."""
    places = [_place(name) for _, name in trace.moments]
    following: list[_Place | None] = [None] * len(places)  # the next block of the same pass
    for number in range(len(places) - 2, -1, -1):
        if trace.moments[number][1].split()[0] == trace.moments[number + 1][1].split()[0]:
            following[number] = places[number + 1] or following[number + 1]
    found: list[_Segment] = []
    counts: Counter[str] = Counter()
    now: _Place | None = None  # the block to which what computes belongs
    run = 0
    for (start, name), place, after in zip(trace.moments, places, following, strict=True):
        if place is None:
            if now is not None and after is not None and after in (now, _neighbour(now)):
                continue
            now = None
            counts[name] += 1
            found.append(_Segment(f"{name} {counts[name]}", start))
        elif place != now:
            run += now is None or now[:2] != place[:2]
            now = place
            found.append(_Segment(name, start, place[1], place[2], run))
    return found


def _neighbour(place: _Place) -> _Place:
    direction, part, which = place
    return direction, part, which + (1 if direction == "forward" else -1)


def _place(moment: str) -> _Place | None:
    """Return which block a moment is about: ``"forward middle block of part 0"``."""
    words = moment.split()
    if len(words) == 6 and words[1] in _PLACES and words[2] == "block":
        return words[0], int(words[5]), _PLACES[words[1]]
    return None
