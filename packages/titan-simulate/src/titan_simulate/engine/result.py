"""Results of a simulation, as plain values: they can be pickled, compared and written as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from titan_simulate.engine.allocator import Event
from titan_simulate.engine.host_waits import HostWait

BETWEEN_STEPS = "between steps"
"""The phase of validation and logging, which belong to no step."""
AFTER_UPDATE = ("optimizer", "end of step", BETWEEN_STEPS)
"""Phases in which the optimizer's state exists even in the first step."""


class Owner(StrEnum):
    """What a piece of memory is for."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    GATHERED = "gathered parameters"
    """Whole parameters that FSDP has gathered for a while."""
    LOSS = "logits and loss"
    """All that the model's last module allocates: logits, their gradient, and what it keeps for them."""
    COMMUNICATION = "communication"
    ACTIVATIONS = "activations"
    """Results of modules in forward, and of the backward pass."""
    OTHER = "other"


@dataclass(frozen=True)
class Allocation:
    """A piece of memory that is alive at a peak. Pieces that differ in nothing but their address are counted together."""

    bytes: int
    """Of one of them."""
    count: int
    owner: Owner
    operator: str
    """The operator that made it."""
    module: str
    """Name of the module that was computing, ``""`` if none was."""
    phase: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Peak:
    """The moment of a phase at which most memory was in use."""

    bytes: int
    owners: Mapping[Owner, int]
    """Bytes by owner."""
    modules: Mapping[str, int]
    """Bytes by the module that allocated them."""
    belonging: Mapping[Owner, Mapping[str, int]]
    """Bytes by owner, and by the module to which they belong (:data:`Label`)."""
    operator: str
    """The operator that was running."""
    module: str
    allocations: tuple[Allocation, ...]
    """Largest totals first."""


Label = tuple[Owner, str, str]
"""Of memory: its owner, the module that allocated it, and the one to which it belongs, which is that of a parameter, of its
gradient and of its optimizer state, and else the one that allocated it."""


def peak_of(
    sizes: Mapping[Label, int], operator: str, module: str, allocations: tuple[Allocation, ...] = ()
) -> Peak:  # fmt: skip
    """Return the peak at which ``sizes`` bytes are in use."""
    owners: Counter[Owner] = Counter()
    modules: Counter[str] = Counter()
    belonging: dict[Owner, dict[str, int]] = {}  # no Counter, which asdict() would count again
    for (owner, maker, of), size in sizes.items():
        owners[owner] += size
        modules[maker] += size
        modules_of = belonging.setdefault(owner, {})
        modules_of[of] = modules_of.get(of, 0) + size
    by_size = dict(owners.most_common()), dict(modules.most_common())
    return Peak(owners.total(), *by_size, belonging, operator, module, allocations)


@dataclass(frozen=True)
class AllocationTrace:
    """All allocations and frees of a rank, in the order in which the host requests them."""

    events: tuple[Event, ...] = ()
    moments: tuple[tuple[int, str], ...] = ()
    """Where each phase begins: (position in :attr:`events`, its name)."""
    marks: tuple[tuple[int, Any], ...] = ()
    """What an observer has marked: (position in :attr:`events`, the mark)."""
    labels: tuple[Label, ...] = ()
    """Of each allocation; allocations are numbered from 1."""


@dataclass(frozen=True)
class Collective:
    """Calls of one collective on one process group in one phase."""

    operator: str
    group: str
    """Description of the group: ``"mesh_tp"``, or ``"default_pg"`` for all ranks."""
    ranks: int
    device: str
    """``"cuda"``, or ``"cpu"`` for host values."""
    phase: str
    count: int
    bytes: int
    """Sum over the calls of the larger of input and output."""


@dataclass(frozen=True)
class PhaseFigures:
    """A phase of a step: ``forward``, ``backward``, ``norm``, ``clip``, ``optimizer`` or ``end of step``; or
    :data:`BETWEEN_STEPS`."""

    name: str
    peak: Peak
    live: int
    """Bytes in use at its end."""
    launches: int
    """Operators that launch a kernel. Some launch several."""
    flops: int
    """Floating-point operations of matmuls and attention."""


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step, or what happens before the first (``step`` 0)."""

    step: int
    phases: tuple[PhaseFigures, ...]
    collectives: tuple[Collective, ...]
    waits: tuple[HostWait, ...]
    """Where the host waited for the device, and was allowed to."""
    garbage: int
    """Bytes on the device that only Python's garbage collector frees: tensors in reference cycles."""
    seconds: float
    """That the simulation took."""

    @property
    def peak(self) -> Peak:
        """The peak of the step."""
        return max((phase.peak for phase in self.phases), key=lambda peak: peak.bytes)

    @property
    def launches(self) -> int:
        """Operators that launch a kernel."""
        return sum(phase.launches for phase in self.phases if phase.name != BETWEEN_STEPS)

    @property
    def flops(self) -> int:
        """Floating-point operations of matmuls and attention."""
        return sum(phase.flops for phase in self.phases if phase.name != BETWEEN_STEPS)

    def phase(self, name: str) -> PhaseFigures:
        """Return the phase called ``name``."""
        return next(phase for phase in self.phases if phase.name == name)


@dataclass(frozen=True)
class SimulatedRank:
    """One rank of a job, simulated."""

    rank: int
    world_size: int
    mesh: str
    """The mesh, in words."""
    device: str
    """Name of the simulated device."""
    start: StepFigures
    """Everything before the first step."""
    steps: tuple[StepFigures, ...]
    resident: Mapping[Owner, int]
    """Bytes between steps, by owner: parameters, buffers, optimizer state."""
    on_host: int
    """Largest number of bytes that this rank keeps on the host for its model: offloaded parameters, optimizer state,
    averages, activations."""
    allocations: AllocationTrace = AllocationTrace()
    """From the start to the end of the last step."""

    @property
    def peak(self) -> Peak:
        """The largest peak of training. The first update makes the optimizer's state, so the forward and backward passes of
        later steps need that much more than those of the first."""
        peaks = [
            self._with_state(phase.peak) if phase.name not in AFTER_UPDATE else phase.peak
            for step in self.steps
            for phase in step.phases
        ]
        return max(peaks, key=lambda peak: peak.bytes)

    def _with_state(self, peak: Peak) -> Peak:
        state = self.resident.get(Owner.OPTIMIZER, 0)
        missing = state - peak.owners.get(Owner.OPTIMIZER, 0)
        if missing <= 0:
            return peak
        return replace(peak, bytes=peak.bytes + missing, owners={**peak.owners, Owner.OPTIMIZER: state})
