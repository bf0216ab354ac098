"""The memory that a job takes of its device: what torch's allocator reserves, and what lies outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from titan_simulate.engine.allocator import MIB, Event, OutOfMemory, Reserved, replay
from titan_simulate.engine.result import AllocationTrace
from titan_simulate.estimate.traced_rank import TracedRank
from titan_simulate.estimate.unroll import CannotUnroll, unroll
from titan_simulate.hardware.machine import Machine

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemoryNeed:
    """Memory of one device."""

    reserved: float
    """Bytes that the allocator reserves at most."""
    outside: float
    """Bytes of the CUDA context and of communicators."""
    fits: bool
    retries: int
    """How often the device is full in the simulated steps, so that the allocator returns free memory to it, and waits."""

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.reserved + self.outside


def memory_need(samples: Sequence[TracedRank], machine: Machine, allocated: float, share: float) -> DeviceMemoryNeed:
    """Return what a rank needs.

    Args:
        samples: one that has all blocks; or one with few blocks per part and one with a block more.
        allocated: largest number of bytes in use at a time, of all blocks.
        share: by how many times the difference of the samples to extend the first one, if blocks do not repeat.
    """
    outside = outside_bytes(samples[-1], machine)
    limit = int(machine.memory_gib * GIB - outside)
    if not machine.allocator.caching:
        return DeviceMemoryNeed(allocated, outside, allocated <= limit, 0)
    expandable = machine.allocator.expandable_segments
    before = [*_workspaces(samples[-1].found.allocations, machine), *_kept_sends(samples[-1])]

    def need(events: Sequence[Event]) -> Reserved:
        events = [*before, *events]
        found = replay(events, expandable)
        if found.reserved <= limit:
            return found
        try:
            return replay(events, expandable, limit)
        except OutOfMemory:
            return replace(found, retries=-1)

    try:
        found = need(_events(samples))
    except CannotUnroll:
        few, more = (replay([*before, *one.found.allocations.events], expandable) for one in samples)
        whole = few.reserved + int((more.reserved - few.reserved) * share)
        return DeviceMemoryNeed(whole, outside, whole <= limit, 0)
    return DeviceMemoryNeed(found.reserved, outside, found.retries >= 0, max(0, found.retries))


def _events(samples: Sequence[TracedRank]) -> Sequence[Event]:
    few, more = samples[0], samples[-1]
    if few is more:
        return more.found.allocations.events
    parts = more.parts
    copies = [1 + whole - len(kept) for whole, kept in zip(parts.blocks, parts.kept, strict=True)]
    return unroll(few.found.allocations, more.found.allocations, copies)


def _workspaces(trace: AllocationTrace, machine: Machine) -> list[Event]:
    """Return the allocations of cuBLAS, for matmuls on the stream that most memory belongs to."""
    size = int(machine.allocator.workspace_mib * MIB)
    if not size or not trace.events:
        return []
    return [(-number, size, _main_stream(trace)) for number in range(1, machine.allocator.handles + 1)]


def _kept_sends(sample: TracedRank) -> list[Event]:
    """Return allocations for what the schedule keeps of microbatches that are not simulated."""
    if not sample.kept_sends or not sample.send_bytes:
        return []
    stream = _main_stream(sample.found.allocations)
    return [(-1000 - number, sample.send_bytes, stream) for number in range(sample.kept_sends)]


def _main_stream(trace: AllocationTrace) -> int:
    return trace.events[0][2]


def outside_bytes(sample: TracedRank, machine: Machine) -> float:
    """Return the memory of a device that does not belong to torch's allocator."""
    groups = {one.group for step in sample.found.steps for one in step.collectives if one.device == "cuda" and one.ranks > 1}
    channels = machine.links.multiprocessors
    return machine.context_gib * GIB + len(groups) * channels * machine.links.channel_mib * MIB
