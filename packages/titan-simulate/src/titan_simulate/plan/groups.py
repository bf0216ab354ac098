"""Groups of ranks that communicate, and how long that takes. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titan_core.api import MeshPlan
from titan_simulate.hardware.machine import Machine


@dataclass
class Group:
    """Ranks that communicate in a ring."""

    ranks: int
    bandwidth: float
    """Bytes per second of a rank, of all the links that its neighbours share."""
    latency: float
    """Seconds of a call, whatever its size."""
    hop: float
    """Bytes per second between neighbours that are farthest apart."""
    together: int
    """Ranks of a node."""
    near: float
    """Bytes per second of a rank, to the others of its node."""
    reach: float
    """Seconds of a call in which each rank sends to all others at once, whatever its size."""

    def passing(self, size: float, calls: float) -> float:
        """Return the seconds to pass ``size`` bytes on to the next rank: ``size / hop``, and a hop's latency per call."""
        return size / self.hop + calls * self.latency / self.ranks if self.ranks > 1 else 0.0

    def seconds(self, size: float, calls: float) -> float:
        """Return the seconds to gather tensors of ``size`` bytes in all, or to reduce and scatter them: each rank has its
        own share already, so ``size x (ranks - 1) / ranks / bandwidth``, and the latency of each call."""
        if self.ranks < 2:
            return 0.0
        return size * (self.ranks - 1) / self.ranks / self.bandwidth + calls * self.latency

    def exchange(self, size: float, calls: float) -> float:
        """Return the seconds in which each rank sends an equal share of its ``size`` bytes to each rank. What goes to other
        nodes passes a rank's own network card, while the rest stays in the node::

            max((together - 1) / ranks x size / near, (ranks - together) / ranks x size / hop), and the latency of each call
        """
        if self.ranks < 2:
            return 0.0
        near = (self.together - 1) / self.ranks * size / self.near
        far = (self.ranks - self.together) / self.ranks * size / self.hop
        return max(near, far) + calls * self.reach


def group_along(machine: Machine, mesh: MeshPlan, names: Sequence[str], degree: int | None = None, stride: int = 1) -> Group:
    """Return the group of ranks along the dimensions ``names``, or the ``degree`` neighbours among them, or every
    ``stride``-th of them.

    A group within a node uses the node's links. Otherwise the ring crosses nodes, and all its ranks in a node share their
    cards for it.
    """
    inside = 1  # ranks between neighbours of the group
    for dim in reversed(mesh.dims):
        if dim.name in names:
            break
        inside *= mesh.degrees[dim.name]
    inside *= stride
    ranks = math.prod(mesh.degrees[name] for name in names) // stride if degree is None else degree
    together = max(1, min(ranks, machine.ranks_per_node // inside))
    node, network = machine.links.node, machine.links.network
    start = machine.links.start_us * 1e-6
    if together == ranks:
        bandwidth = node.bandwidth_gb_s * 1e9
        reach = start + node.latency_us * 1e-6
        return Group(ranks, bandwidth, start + ranks * node.latency_us * 1e-6, bandwidth, together, bandwidth, reach)
    bandwidth = together * network.bandwidth_gb_s
    bandwidth = min(bandwidth, node.bandwidth_gb_s) if together > 1 else bandwidth
    hops = start + ranks / together * network.latency_us * 1e-6
    reach = start + network.latency_us * 1e-6
    rates = network.bandwidth_gb_s * 1e9, together, node.bandwidth_gb_s * 1e9
    return Group(ranks, bandwidth * 1e9, hops, *rates, reach)
