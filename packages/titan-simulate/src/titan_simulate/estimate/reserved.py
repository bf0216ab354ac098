"""The memory that a job takes of its device: what torch's allocator reserves, and what lies outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_simulate.engine.allocator import MIB, Event, OutOfMemory, replay
from titan_simulate.engine.result import AllocationTrace
from titan_simulate.estimate.unroll import CannotUnroll, unroll
from titan_simulate.hardware.machine import Machine

if TYPE_CHECKING:
    from titan_simulate.estimate.reduce import Parts
    from titan_simulate.estimate.traced_rank import TracedRank

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemoryNeed:
    """Memory of one device."""

    allocated: float
    """Bytes in use at most: ``torch.cuda.max_memory_allocated``."""
    idle: float
    """Bytes that the allocator has reserved and that are not in use, when it has reserved most."""
    outside: float
    """Bytes of the CUDA context and of communicators."""
    fits: bool
    retries: int
    """How often the device is full in the simulated steps, so that the allocator returns free memory to it, and waits."""

    @property
    def reserved(self) -> float:
        """Bytes that the allocator reserves at most: ``torch.cuda.max_memory_reserved``."""
        return self.allocated + self.idle

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.reserved + self.outside


def memory_need(samples: Sequence[TracedRank], machine: Machine, allocated: float, share: float) -> DeviceMemoryNeed:
    """Return what a rank needs.

    Two models of the memory in use meet here: peaks of phases, which extend linearly to all blocks, and the replay of the
    allocations of all blocks. If they differ, the larger one counts.

    Args:
        samples: one that has all blocks; or one with few blocks per part and one with a block more.
        allocated: largest number of bytes that tensors take at a time, of all blocks.
        share: by how many times the difference of the samples to extend the first one, if blocks do not repeat.
    """
    outside = outside_bytes(samples[-1], machine)
    limit = int(machine.memory_gib * GIB - outside)
    if not machine.allocator.caching:
        return DeviceMemoryNeed(allocated, 0.0, outside, allocated <= limit, 0)
    expandable = machine.allocator.expandable_segments
    workspaces = workspaces_of(samples[-1].found.allocations, machine)
    before = [*workspaces, *_kept_sends(samples[-1])]
    least = allocated + sum(size for _, size, _ in workspaces)

    def need(events: Sequence[Event]) -> DeviceMemoryNeed:
        events = [*before, *events]
        found = replay(events, expandable)
        most, idle, retries = max(least, float(found.allocated)), float(found.idle), 0
        if most + idle > limit:
            try:
                limited = replay(events, expandable, limit)
            except OutOfMemory:
                return DeviceMemoryNeed(most, idle, outside, fits=False, retries=0)
            most = max(least, float(limited.allocated))
            idle, retries = min(float(limited.idle), max(0.0, limit - most)), limited.retries
        return DeviceMemoryNeed(most, idle, outside, most <= limit, retries)

    try:
        return need(_events(samples))
    except CannotUnroll:
        few, more = (replay([*before, *one.found.allocations.events], expandable) for one in samples)
        # The two may have their peaks in phases of which only one grows with the blocks, so peaks do not extend linearly.
        idle = max(0.0, few.idle + (more.idle - few.idle) * share)
        return DeviceMemoryNeed(least, idle, outside, least + idle <= limit, 0)


def _events(samples: Sequence[TracedRank]) -> Sequence[Event]:
    few, more = samples[0], samples[-1]
    if few is more:
        return more.found.allocations.events
    return unroll(few.found.allocations, more.found.allocations, copies_of(few.parts, more.parts))


def copies_of(few: Parts, more: Parts) -> list[int]:
    """Return, by part of the model, how many of their like the blocks in the middle of ``more`` stand for; 0 if a part is
    whole in both."""
    return [
        1 + (whole - len(kept)) // repeating if len(kept) > len(less) else 0
        for whole, kept, less, repeating in zip(more.blocks, more.kept, few.kept, more.repeating, strict=True)
    ]


def workspaces_of(trace: AllocationTrace, machine: Machine) -> list[Event]:
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
