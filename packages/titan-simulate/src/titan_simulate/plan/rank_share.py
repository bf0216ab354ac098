"""Share of a model and a step that one rank holds and computes, for terms of memory and time. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan_simulate.plan.model_sizes import Held, Unit, keys_of
from titan_simulate.plan.unit_kinds import UnitKinds
from titan_simulate.plan.workload import Workload, divided, shards, views


@dataclass(frozen=True)
class HeldUnits:
    """The units that a rank holds. Units of the same sizes are counted, because models repeat blocks."""

    blocks: tuple[tuple[int, int], ...]
    """Number of the kind, and how often it occurs."""
    others: tuple[int, ...]
    """Kinds of the units of embedding and head."""
    head: bool
    alive: float
    """Microbatches whose activations are alive at once."""
    copied: int
    """Parameters that another stage has too, and updates."""


class RankShare:
    """A rank's share of a job: of its model, its batch and its passes."""

    def __init__(self, units: UnitKinds, job: Workload, held: HeldUnits, imbalance: float) -> None:
        """``imbalance``: see :class:`~titan_simulate.plan.arithmetic.Arithmetic`."""
        self.units, self.job, self.held = units, job, held
        self.machine, self.sizes, self.mesh = units.machine, units.sizes, job.mesh
        kinds, pipeline = units.kinds, job.pipeline
        self.blocks = [(kinds[kind], count) for kind, count in held.blocks]
        self.laps = sum(count for _, count in held.blocks)
        """Blocks of this rank."""
        self.weights, self.sequence = divided(job.mesh, "weights"), divided(job.mesh, "sequence")
        self.ring = self.sequence // job.exchanges_heads
        """Ranks that divide the sequence and do not exchange heads."""
        self.shards = shards(job.mesh)
        self.width = job.parameter_bytes
        divides = any(job.mesh.view_degrees[view.name] > 1 for view in job.mesh.views if view.shards_parameters)
        self.imbalance = imbalance if divides else 1.0
        """Without division, each rank computes its own rows, however they are chosen."""
        self.count = job.microbatches if pipeline is None else pipeline.microbatches
        size = job.local_batch if pipeline is None else pipeline.microbatch_size
        self.tokens = size * job.seq_len / self.sequence
        """Positions of a microbatch that this rank shares only with those that divide its weights."""
        self.again = 1.0 + job.recomputed / 3
        """Computation, by that without recomputation: forward is a third of it."""
        self.passes = (4 + 2 * job.recomputed) * self.count
        """Collectives around a region of a block: two in each pass of forward, backward and recomputation."""
        self.whole, self.experts, self.largest, self.exact = self._parameters()
        on_views = views(job.mesh)
        in_matrices = sum(
            count * _on_rank(unit, self.weights, on_views) * _share_of_matrices(unit) for unit, count in self.blocks
        )
        self.in_matrices = in_matrices / max(1.0, self.whole)
        """Share of this rank's parameters that are matrices of blocks."""

    def _parameters(self) -> tuple[float, float, float, float]:
        """Return the parameters of this rank, before data parallelism divides them; those of its experts; those of its
        largest unit; and those that compute in fp32. Of a unit: ``replicated + divided / weights + experts / views``."""
        weights, ranks = self.weights, views(self.mesh)
        whole = on_views = largest = exact = 0.0
        for kind, count in (*self.held.blocks, *((kind, 1) for kind in self.held.others)):
            unit = self.units.kinds[kind]
            experts = unit.experts / ranks + unit.divided_experts / (ranks * weights)
            each = _on_rank(unit, weights, ranks)
            whole, on_views, largest = whole + count * each, on_views + count * experts, max(largest, each)
            exact += count * _on_rank(unit.exact, weights, ranks)
        copied = self.held.copied / weights
        return whole + copied, on_views, max(largest, copied), exact

    def features(self, unit: Unit) -> float:
        """Return the features of a position that a block computes, with the empty places of buffers of a fixed size."""
        padding = 0.0 if self.job.exchanged_rows is None else (self.job.exchanged_rows - 1) * unit.of_experts
        return unit.shared + (unit.split + padding) / self.weights

    def keys_of(self, unit: Unit) -> float:
        """Return the features of the keys and values that a ring exchanges, per position: within a window, only of those
        before a rank's two chunks that the window covers."""
        others = self.job.seq_len * (self.ring - 1) / self.ring
        windows = [math.inf if mixer.window is None else 2.0 * mixer.window for mixer in unit.mixers]
        return sum(
            keys_of(mixer, self.sizes.dim) * min(1.0, covered / max(1.0, others))
            for mixer, covered in zip(unit.mixers, windows, strict=True)
        )

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the device's memory moves."""
        memory = self.machine.memory
        return memory.bandwidth_gb_s * 1e9 * memory.efficiency


def _share_of_matrices(unit: Unit) -> float:
    return sum(rows * columns * number for rows, columns, number in unit.weights) / max(1, unit.parameters)


def _on_rank(held: Held, weights: int, views: int) -> float:
    """Return the parameters of a rank."""
    experts = held.experts / views + held.divided_experts / (views * weights)
    return held.replicated + held.divided / weights + experts
