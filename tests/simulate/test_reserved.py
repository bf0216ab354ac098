"""What an estimate says that a job reserves is no less than what it says that the job uses, whatever the samples are."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("titan_simulate")

from titan_simulate.engine.allocator import MIB, Event, replay
from titan_simulate.engine.result import AllocationTrace, SimulatedRank
from titan_simulate.estimate.reduce import Parts
from titan_simulate.estimate.reserved import GIB, memory_need
from titan_simulate.estimate.traced_rank import TracedRank
from titan_simulate.estimate.unroll import CannotUnroll, unroll
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import read_machine

WHOLE = 8
PLACES = ("first", "middle", "last")
WORKSPACES = 2 * 32 * MIB


def _machine(memory_gib: float = 1.0, **allocator: object) -> Machine:
    machine = read_machine("h100")
    changed = machine.allocator.model_copy(update=allocator)
    return machine.model_copy(update={"memory_gib": memory_gib, "context_gib": 0.0, "allocator": changed})


def _sample(blocks: int, events: list[Event], moments: list[tuple[int, str]]) -> TracedRank:
    found = SimulatedRank(0, 1, "", "", None, (), {}, 0, AllocationTrace(tuple(events), tuple(moments)))  # type: ignore[arg-type]
    parts = Parts([WHOLE], [[f"layers.{number}" for number in range(blocks)]], [], repeating=[1])
    return TracedRank(0, [], found, parts, 1, None)


@st.composite
def samples(draw: st.DrawFn) -> list[TracedRank]:
    """Two simulations whose blocks need not repeat: each keeps and frees whatever it likes."""
    found = []
    for blocks in (2, 3):
        events: list[Event] = [(1, draw(st.integers(1, 64)) * MIB, 0)]
        moments, alive = [(0, "start")], [1]
        for direction in ("forward", "backward"):
            order = PLACES if direction == "forward" else PLACES[::-1]
            for place in order if blocks == 3 else (order[0], order[-1]):
                moments.append((len(events), f"{direction} {place} block of part 0"))
                for _ in range(draw(st.integers(0, 4))):
                    if alive and draw(st.booleans()):
                        events.append((alive.pop(draw(st.integers(0, len(alive) - 1))), 0, 0))
                    else:
                        number = len(events) + 1
                        events.append((number, draw(st.integers(1, 200)) * MIB, draw(st.sampled_from([0, 7]))))
                        alive.append(number)
            moments.append((len(events), f"{direction} head"))
            number = len(events) + 1
            events += [(number, draw(st.integers(1, 300)) * MIB, 0), (number, 0, 0)]
        found.append(_sample(blocks, events, moments))
    return found


@given(samples(), st.floats(0.0, 4.0), st.sampled_from([0.25, 1.0, 4.0, 64.0]), st.booleans(), st.booleans())
def test_a_job_reserves_what_it_uses(
    pair: list[TracedRank], allocated: float, memory: float, caching: bool, expandable: bool
) -> None:
    machine = _machine(memory, caching=caching, expandable_segments=expandable)
    need = memory_need(pair, machine, allocated * GIB, WHOLE - 2)
    assert need.reserved >= need.allocated >= allocated * GIB
    assert need.bytes == need.reserved + need.outside
    if need.fits:
        assert need.bytes <= memory * GIB


def test_peaks_in_different_phases_extend_each_by_its_own() -> None:
    """With few blocks, most memory is in use in the head; with all, in the blocks, which do not repeat here. The reserved
    memory of the few was extended, and stayed what the head needs."""
    pair = []
    for blocks in (2, 3):
        events: list[Event] = [(1, 900 * MIB, 0), (1, 0, 0)]  # the head
        events += [(2 + number, 100 * MIB, 0) for number in range(blocks)]
        moments = [(0, "forward head"), *((2 + n, f"forward {PLACES[n]} block of part 0") for n in range(blocks))]
        moments += [(len(events), "backward first block of part 0")]
        if blocks == 3:  # freed in a pass that has no block in the middle
            events += [(3, 0, 0), (100, 100 * MIB, 0)]
        pair.append(_sample(blocks, events, moments))
    few, more = (one.found.allocations for one in pair)
    with pytest.raises(CannotUnroll):
        unroll(few, more, [WHOLE - 2])
    need = memory_need(pair, _machine(16.0), 8 * 100 * MIB + 800 * MIB, WHOLE - 2)
    assert need.allocated == 1600 * MIB + WORKSPACES
    assert need.reserved >= need.allocated


def test_what_is_reserved_and_idle_is_that_of_the_replay() -> None:
    whole = [_sample(3, [(1, 30 * MIB, 0), (1, 0, 0), (2, 20 * MIB, 7)], [(0, "start")])]
    found = replay([(-1, 32 * MIB, 0), (-2, 32 * MIB, 0), (1, 30 * MIB, 0), (1, 0, 0), (2, 20 * MIB, 7)], expandable=True)
    need = memory_need(whole, _machine(), 30 * MIB, 0.0)
    assert (need.allocated, need.idle) == (found.allocated, found.reserved - found.allocated) == (94 * MIB, 26 * MIB)
    assert (need.fits, need.retries) == (True, 0)


def test_a_full_device_gives_back_what_is_idle() -> None:
    """100 MiB of one stream are free when another one needs 100 MiB, and the device has 180."""
    events: list[Event] = [(1, 100 * MIB, 0), (1, 0, 0), (2, 100 * MIB, 7)]
    whole = [_sample(3, events, [(0, "start")])]
    machine = _machine(180 / 1024, workspace_mib=0.0)
    need = memory_need(whole, machine, 100 * MIB, 0.0)
    assert (need.fits, need.retries, need.allocated) == (True, 1, 100 * MIB)
    assert need.reserved <= 180 * MIB
    small = memory_need(whole, _machine(80 / 1024, workspace_mib=0.0), 100 * MIB, 0.0)
    assert not small.fits
