"""The allocations of many blocks, from those of a model with two and with three."""

from __future__ import annotations

import pytest

pytest.importorskip("titan_simulate")

from titan_simulate.engine.allocator import MIB, Event, replay
from titan_simulate.engine.result import AllocationTrace
from titan_simulate.estimate.reduce import Parts
from titan_simulate.estimate.reserved import copies_of
from titan_simulate.estimate.unroll import unroll

MAIN, GATHER = 0, 7


class Toy:
    """Two steps of a model with some blocks, with what real ones do: parameters and optimizer state outside of blocks,
    activations from forward to backward, hidden states that the next block frees, and buffers that its pass frees."""

    def __init__(self, *parts: int) -> None:
        """
        Args:
            parts: number of blocks of each part.
        """
        self.events: list[Event] = []
        self.moments: list[tuple[int, str]] = [(0, "start")]
        blocks = sum(parts)
        names = [
            f"{name} block of part {part}"
            for part, count in enumerate(parts)
            for name in ("first", *["middle"] * (count - 2), "last")
        ]
        for _ in names:
            self.make(4 * MIB)
        for step in (1, 2):
            kept, buffer, hidden = [], 0, 0
            self.enter("forward embedding")
            hidden = self.make(3 * MIB)
            for name in names:
                self.enter(f"forward {name}")
                gathered = self.make(32 * MIB, GATHER)
                if buffer:
                    self.free(buffer)
                buffer = gathered
                kept.append([hidden, self.make(13 * MIB), self.make(1000)])
                self.free(self.make(25 * MIB))
                hidden = self.make(3 * MIB)
            self.enter("forward head")
            self.free(buffer)
            logits = self.make(90 * MIB)
            self.enter("backward head")
            self.free(logits)
            gradient, reduced = self.make(3 * MIB), 0
            gradients = []
            for name, own in zip(reversed(names), reversed(kept), strict=True):
                self.enter(f"backward {name}")
                self.free(self.make(40 * MIB))
                for one in own:
                    self.free(one)
                new = self.make(3 * MIB)
                self.free(gradient)
                gradient = new
                if reduced:
                    self.free(reduced)
                reduced = self.make(64 * MIB)
                gradients.append(self.make(2 * MIB, GATHER))
            self.enter("norm")
            for one in (gradient, reduced, hidden, self.make(4096 * blocks)):
                self.free(one)
            self.enter("optimizer")
            if step == 1:
                for _ in names:
                    self.make(8 * MIB)
            self.enter("end of step")
            for one in gradients:
                self.free(one)

    def enter(self, name: str) -> None:
        if self.moments[-1][1] != name:
            self.moments.append((len(self.events), name))

    def make(self, size: int, stream: int = MAIN) -> int:
        number = len(self.events) + 1
        self.events.append((number, size, stream))
        return number

    def free(self, number: int) -> None:
        self.events.append((number, 0, 0))

    @property
    def trace(self) -> AllocationTrace:
        return AllocationTrace(tuple(self.events), tuple(self.moments))


def sizes(events: list[Event]) -> list[int]:
    """Return what each event allocates, or, negative, frees."""
    made = {number: size for number, size, _ in events if size}
    return [size or -made[number] for number, size, _ in events]


@pytest.mark.parametrize("blocks", [3, 4, 9])
def test_unrolled_blocks_are_those_of_the_whole_model(blocks: int) -> None:
    found = unroll(Toy(2).trace, Toy(3).trace, [blocks - 2])
    whole = Toy(blocks).events
    assert sizes(found) == sizes(whole)
    for expandable in (False, True):
        assert replay(found, expandable) == replay(whole, expandable)


def _parts(*blocks: int, most: int) -> Parts:
    kept = [[f"layers.{number}" for number in range(min(most, count))] for count in blocks]
    return Parts(list(blocks), kept, [], repeating=[int(len(names) == most) for names in kept])


@pytest.mark.parametrize("blocks", [(4, 5), (5, 4), (3, 4, 6), (2, 9), (9, 2), (2, 2, 5), (3, 3)], ids=str)
def test_parts_with_different_numbers_of_blocks_are_unrolled_each_by_its_own(blocks: tuple[int, ...]) -> None:
    """The stages of a rank of a pipeline are rarely equal. What lies outside of blocks, such as optimizer state, was
    repeated by the rounded mean of the parts: a block too few or too many."""
    few, more = (Toy(*(min(most, count) for count in blocks)).trace for most in (2, 3))
    found = unroll(few, more, copies_of(_parts(*blocks, most=2), _parts(*blocks, most=3)))
    whole = Toy(*blocks).events
    assert sorted(sizes(found)) == sorted(sizes(whole))
    assert replay(found, expandable=True).allocated == replay(whole, expandable=True).allocated
