"""The model of asynchronous tensor parallelism: a gather, or a reduction, is divided among the matmul that it belongs to.
Free of torch.

Each rank's share of the input is multiplied while the next one is on its way, so of the shorter of the two only the part
that has nothing to overlap with remains: one share of the group's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titan_simulate.estimate.roofline import seconds_of
from titan_simulate.estimate.work import Kind, Work
from titan_simulate.hardware.machine import Machine

NEAR = 12
"""How many operators may lie between a collective and its matmul: waits, views made contiguous, casts. Other collectives do
not count: large sequences are gathered one by one."""


def overlap_tensor_parallel(trace: Sequence[Work], machine: Machine) -> list[Work]:
    """Return ``trace`` with each all-gather before a matmul, and each reduce-scatter after one, less the seconds that the
    matmul hides. Collectives that share a matmul share its time."""
    found = list(trace)
    left: dict[int, float] = {}  # position of a matmul -> seconds of it that still hide nothing
    for position, work in enumerate(trace):
        matmul = _matmul_of(trace, position) if work.kind is Kind.COLLECTIVE and len(work.ranks) > 1 else None
        # On a stream of their own, FSDP's collectives overlap already.
        if matmul is None or (work.name.startswith("c10d::") and work.stream != trace[matmul].stream):
            continue
        own, time = seconds_of(work, machine), left.get(matmul, seconds_of(trace[matmul], machine))
        hidden = min(own, time)
        left[matmul] = time - hidden
        found[position] = replace(work, hidden_seconds=hidden * (1 - 1 / len(work.ranks)))
    return found


def _matmul_of(trace: Sequence[Work], position: int) -> int | None:
    """Return the position of the matmul that reads what a collective gathers, or writes what it reduces, if any."""
    name = trace[position].name.replace("_", "")
    if "allgather" in name:
        others = range(position + 1, len(trace))
    elif "reducescatter" in name:
        others = range(position - 1, -1, -1)
    else:
        return None
    between = 0
    for other in others:
        if trace[other].kind is Kind.MATMUL:
            return other
        between += trace[other].kind is not Kind.COLLECTIVE
        if between >= NEAR:
            return None
    return None
