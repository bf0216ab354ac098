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
"""How many operators may lie between a collective and its matmul: waits, views made contiguous, casts."""


def overlap_tensor_parallel(trace: Sequence[Work], machine: Machine) -> list[Work]:
    """Return ``trace`` with each all-gather before a matmul, and each reduce-scatter after one, shortened by what it hides
    behind."""
    found = list(trace)
    for position, work in enumerate(trace):
        gathers = "all_gather" in work.name
        if (
            work.kind is not Kind.COLLECTIVE
            or work.name.startswith("c10d::")
            or not (gathers or "reduce_scatter" in work.name)
        ):
            continue
        near = trace[position + 1 : position + 1 + NEAR] if gathers else trace[max(0, position - NEAR) : position][::-1]
        matmul = next((one for one in near if one.kind is Kind.MATMUL), None)
        if matmul is None or len(work.ranks) < 2:
            continue
        own = seconds_of(work, machine)
        hidden = min(own, seconds_of(matmul, machine)) * (1 - 1 / len(work.ranks))
        found[position] = replace(work, bytes=int(work.bytes * max(0.0, 1 - hidden / own)) if own else work.bytes)
    return found
