"""Rough memory and time of a job on a machine, from the model's layout and the mesh alone. Free of torch.

It ranks thousands of candidates, so that only a few need a simulation. It knows what a mesh dimension divides (layers, the
batch, the sequence, weights, experts) and no parallelism. All sizes are per rank; the worst rank of a pipeline counts.

Memory, with P the rank's parameters after all divisions, in bytes::

    state        P (4 weights + 4 gradients + 8 optimizer), on the device unless offloaded
    gathered     weights (and gradients in the type of their reduction) that data parallelism shards: of two blocks, or of
                 the whole rank if they stay gathered
    activations  tokens x (input of the block + kept x features) x microbatches alive, one block entirely, and the keys and
                 values of other positions that it attends to
    logits       a chunk in fp32 and its gradient

Time of a step::

    compute      matmul and mixer operations / rates, x (1 + recomputed / 3) + pointwise traffic / bandwidth; at least the
                 host's time to issue the operators
    waits        collectives that nothing hides: of weights and sequences, as far as matmuls or attention do not, of experts
                 and of stages
    idle         (compute + waits) x the pipeline's idle share
    hidden       collectives of data parallelism, as far as they take longer than compute
    update       traffic of the optimizer / bandwidth

A ring over n ranks moves (n - 1) / n of a tensor per rank to gather or scatter it. A group within a node uses the node's
links. Otherwise all its ranks in a node share the traffic to other nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from titan_core.api import MeshPlan, PipelineCosts
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.model_sizes import ModelSizes, Unit

GIB = 2**30
STATE = "parameters, gradients, optimizer"
_CHUNK = 2**30
"""Bytes of the fp32 logits of a chunk of the loss."""
_FRAGMENTS = 0.12
"""Reserved memory that is not in use, relative to that in use: a guess that only ranks candidates."""
_OPERATORS = 160
"""Operators of a block, forward and backward, that an eager host issues; a compiled block has a fifth of them."""


@dataclass(frozen=True)
class Workload:
    """A job as numbers."""

    mesh: MeshPlan
    seq_len: int
    local_batch: int
    microbatches: int
    parameter_bytes: int = 4
    """Bytes of a parameter in forward and backward."""
    reduce_bytes: int = 4
    """Bytes of a gradient that is reduced."""
    offloads: bool = False
    kept: float = 1.0
    recomputed: float = 0.0
    fused: bool = False
    matmul_type: str = "fp32"
    """Type of the matmuls of blocks."""
    wide_type: str = "fp32"
    """Type of all other matmuls."""
    parameters_stay: bool = False
    gradients_stay: bool = False
    overlaps_matmuls: bool = False
    passes_keys: bool = False
    pipeline: PipelineCosts | None = None


@dataclass(frozen=True)
class Guess:
    """The rough cost of a candidate."""

    memory: Mapping[str, float]
    """Bytes by kind."""
    seconds: Mapping[str, float]
    """By kind; names of mesh dimensions and views for collectives."""

    @property
    def peak_gib(self) -> float:
        """Memory of the worst rank."""
        return sum(self.memory.values()) / GIB

    @property
    def least_gib(self) -> float:
        """Memory that no recomputation, schedule or batch split changes."""
        return (self.memory[STATE] + self.memory["context"]) / GIB

    @property
    def step_seconds(self) -> float:
        """Duration of a step."""
        return sum(self.seconds.values())


@dataclass
class _Group:
    """Ranks that communicate."""

    ranks: int
    bandwidth: float
    latency: float

    hop: float
    """Bandwidth between neighbours that are farthest apart."""

    def passing(self, size: float, calls: float) -> float:
        """Return the time to pass ``size`` bytes on to the next rank."""
        return size / self.hop + calls * self.latency / self.ranks if self.ranks > 1 else 0.0

    def seconds(self, size: float, calls: float) -> float:
        """Return the time to gather tensors of ``size`` bytes in all, or to reduce and scatter them."""
        if self.ranks < 2:
            return 0.0
        return size * (self.ranks - 1) / self.ranks / self.bandwidth + calls * self.latency


@dataclass(frozen=True)
class _Held:
    """The units that a rank holds. Units of the same sizes are counted, because models repeat blocks."""

    blocks: tuple[tuple[int, int], ...]
    """Number of the kind, and how often it occurs."""
    others: tuple[int, ...]
    """Kinds of the units of embedding and head."""
    head: bool
    alive: float
    """Microbatches whose activations are alive at once."""


class Arithmetic:
    """Guesses the cost of jobs that train one model on one machine."""

    def __init__(self, sizes: ModelSizes, machine: Machine) -> None:
        self._sizes, self._machine = sizes, machine
        self._kinds: list[Unit] = []
        self._kind_of: dict[str, int] = {}
        for name, unit in sizes.units.items():
            if unit not in self._kinds:
                self._kinds.append(unit)
            self._kind_of[name] = self._kinds.index(unit)
        flops = [_flops(unit) for unit in self._kinds]
        total = sum(flops[kind] for kind in self._kind_of.values()) or 1.0
        self._flops = [each / total for each in flops]
        """By kind: share of the model's matmul operations."""
        self._held_before: dict[object, tuple[_Held, ...]] = {}
        self._block_seconds = cache(self._matmul_seconds)

    def guess(self, job: Workload) -> Guess:
        """Return the memory and the time of the worst rank."""
        ranks = self._ranks(job.pipeline)
        memory = max((self._memory(job, rank) for rank in ranks), key=lambda one: sum(one.values()))
        seconds = max((self._seconds(job, rank) for rank in ranks), key=lambda one: sum(one.values()))
        return Guess(memory, seconds)

    def _ranks(self, pipeline: PipelineCosts | None) -> tuple[_Held, ...]:
        """Return what the ranks of a pipeline hold, without repetition."""
        key = None if pipeline is None else (pipeline.stages, pipeline.rank_of, pipeline.alive)
        if key in self._held_before:
            return self._held_before[key]
        last = list(self._sizes.units)[-1]
        names: dict[int, list[str]] = {0: list(self._sizes.units)}
        if pipeline is not None:
            names = {}
            for stage, holder in zip(pipeline.stages, pipeline.rank_of, strict=True):
                names.setdefault(holder, []).extend(stage)
        most: dict[tuple[object, ...], _Held] = {}
        for number, units in names.items():
            blocks = Counter(self._kind_of[name] for name in units if name in self._sizes.blocks)
            others = tuple(self._kind_of[name] for name in units if name not in self._sizes.blocks)
            alive = 1.0 if pipeline is None else pipeline.alive[number]
            held = _Held(tuple(sorted(blocks.items())), others, last in units, alive)
            same = (held.blocks, held.others, held.head)
            if same not in most or most[same].alive < alive:
                most[same] = held
        self._held_before[key] = tuple(most.values())
        return self._held_before[key]

    def _parameters(self, mesh: MeshPlan, kind: int) -> tuple[float, float]:
        """Return a unit's parameters on a rank, before data parallelism divides them, and how many of them are experts."""
        unit, weights, views = self._kinds[kind], divided(mesh, "weights"), math.prod(mesh.view_degrees.values())
        experts = unit.experts / views + unit.divided_experts / (views * weights)
        return unit.replicated + unit.divided / weights + experts, experts

    def _totals(self, mesh: MeshPlan, rank: _Held) -> tuple[float, float, float]:
        """Return a rank's parameters, before data parallelism divides them; its experts; and those of its largest unit."""
        whole = on_views = largest = 0.0
        for kind, count in (*rank.blocks, *((kind, 1) for kind in rank.others)):
            each, experts = self._parameters(mesh, kind)
            whole, on_views, largest = whole + count * each, on_views + count * experts, max(largest, each)
        return whole, on_views, largest

    def _memory(self, job: Workload, rank: _Held) -> dict[str, float]:
        mesh, machine = job.mesh, self._machine
        shards, weights = _shards(mesh), divided(mesh, "weights")
        whole, on_views, largest = self._totals(mesh, rank)
        held = (whole - on_views) / shards + on_views / max(1, shards // math.prod(mesh.view_degrees.values()))
        sharded = shards > 1 or job.parameter_bytes < 4
        parameters = (whole if job.parameters_stay else min(whole, 2 * largest)) * job.parameter_bytes
        gradients = (whole if job.gradients_stay else largest) * job.reduce_bytes
        tokens, width = self._tokens(job), job.parameter_bytes
        features = {kind: self._kinds[kind].shared + self._kinds[kind].split / weights for kind, _ in rank.blocks}
        inputs = sum(count for _, count in rank.blocks) * self._sizes.dim / weights
        kept = rank.alive * (inputs + job.kept * sum(count * features[kind] for kind, count in rank.blocks))
        working = max(features.values(), default=0.0) * (1.0 - job.kept) * (0.75 if job.fused else 1.0)
        sequence = divided(mesh, "sequence")
        keys = max((self._kinds[kind].keys for kind, _ in rank.blocks), default=0) / weights
        exchanged = 0.0 if sequence == 1 else keys * (width + 4) * (2 if job.passes_keys else sequence)
        vocabulary = self._sizes.vocab_size / weights
        chunk = min(tokens, max(1.0, _CHUNK / 4 / vocabulary))
        found = {
            STATE: 0.0 if job.offloads else held * 16,
            "gathered": (parameters + gradients) if sharded else 0.0,
            "activations": tokens * (width * (kept + working) + exchanged),
            "logits and loss": chunk * vocabulary * (4 + 2 * width) if rank.head else 0.0,
        }
        fragments = _FRAGMENTS if machine.allocator.caching else 0.0
        return {**found, "allocator": sum(found.values()) * fragments, "context": machine.context_gib * GIB}

    def _seconds(self, job: Workload, rank: _Held) -> dict[str, float]:
        mesh, machine, sizes = job.mesh, self._machine, self._sizes
        weights, width = divided(mesh, "weights"), job.parameter_bytes
        count = job.microbatches if job.pipeline is None else job.pipeline.microbatches
        tokens = self._tokens(job)  # of a microbatch
        again = 1.0 + job.recomputed / 3
        laps = sum(number for _, number in rank.blocks)
        blocks = [(self._kinds[kind], number) for kind, number in rank.blocks]
        whole, _, _ = self._totals(mesh, rank)

        # Compute
        rows = tokens * count / weights
        matmuls = sum(self._block_seconds(kind, job.matmul_type, weights, tokens) * number for kind, number in rank.blocks)
        matmuls *= count * again
        rest = sum(self._flops[kind] for kind in rank.others) * sizes.matmul_flops * rows
        matmuls += rest / (machine.matmul_of(job.wide_type).achievable_tflops * 1e12)
        mixers = sizes.mixer_flops * rows * laps / max(1, len(sizes.blocks))
        # Of a triangle, a third forward, and 2.5 times that backward.
        forward = mixers / 6
        rates = machine.attention
        attention = forward * (1 + job.recomputed) / (rates.forward_tflops * rates.causal * 1e12)
        attention += 2.5 * forward / (rates.backward_tflops * rates.causal * 1e12)
        traffic = sum((unit.shared + unit.split / weights) * number for unit, number in blocks) * tokens * count * width
        traffic *= (3.0 if job.fused else 8.0) * again
        bandwidth = machine.memory.bandwidth_gb_s * 1e9 * machine.memory.efficiency
        host = machine.host.compiled_kernel_us / 5 if job.fused else machine.host.operator_us
        issue = laps * count * _OPERATORS * again * host * 1e-6
        compute = matmuls + attention + traffic / bandwidth
        found = {"compute": compute - compute * (1 - 1 / again), "recomputation": compute * (1 - 1 / again)}
        found["host"] = max(0.0, issue - compute)

        # Collectives that nothing hides
        regions = sum(unit.regions * number for unit, number in blocks)
        for dim in mesh.dims:
            degree = mesh.degrees[dim.name]
            if degree < 2:
                continue
            group = self._group(mesh, [dim.name])
            if dim.divides == "weights":
                passes = (4 + 2 * job.recomputed) * count
                calls = passes * (regions + 1)
                found[dim.name] = group.seconds(tokens * sizes.dim * width * calls, calls)
                if job.overlaps_matmuls:  # all but the share of one rank
                    found[dim.name] -= min(found[dim.name], matmuls) * (1 - 1 / degree)
            elif dim.divides == "sequence":
                keys = sum(unit.keys * number for unit, number in blocks) / weights
                found[dim.name] = self._exchange(job, group, tokens * keys * count, laps * count, attention)
            elif dim.divides == "layers" and job.pipeline is not None:
                crossings = 2 * len(job.pipeline.stages) / degree * count
                found[dim.name] = group.passing(tokens * sizes.dim * width * crossings, crossings)
        for view in mesh.views:
            degree = mesh.view_degrees[view.name]
            if degree > 1:
                routed = sum(unit.routed * number for unit, number in blocks) / weights
                passes = (4 + 2 * job.recomputed) * count
                group = self._group(mesh, view.borrows, degree)
                found[view.name] = group.seconds(tokens * routed * width * passes, passes * laps)
        busy = sum(found.values())
        if job.pipeline is not None:
            found["idle"] = busy * job.pipeline.idle

        # Collectives of data parallelism, which overlap with computation
        hidden: dict[str, float] = {}
        shard, replicate = mesh.data_dims("shard"), mesh.data_dims("replicate")
        group = self._group(mesh, shard)
        passes = 1.0 if job.parameters_stay else 2.0 * count
        reductions = 1.0 if job.gradients_stay else float(count)
        size = whole * (passes * width + reductions * job.reduce_bytes)
        hidden["+".join(name for name in shard if mesh.degrees[name] > 1)] = group.seconds(
            size, (passes + reductions) * laps
        )
        group = self._group(mesh, replicate)
        size = 2 * whole / _shards(mesh) * job.reduce_bytes * reductions
        hidden["+".join(name for name in replicate if mesh.degrees[name] > 1)] = group.seconds(size, reductions * laps)
        free = compute
        for name, seconds in hidden.items():
            if seconds > free:
                found[name] = found.get(name, 0.0) + seconds - free
            free = max(0.0, free - seconds)

        found["update"] = 0.0 if job.offloads else 28 * whole / _shards(mesh) / bandwidth
        if job.offloads:
            found["update"] = 16 * whole / _shards(mesh) / (machine.host.optimizer_gb_s * 1e9)
        return found

    def _exchange(self, job: Workload, group: _Group, features: float, exchanges: float, attention: float) -> float:
        """Return the time of exchanging keys and values that attention does not hide. Their gradients are summed in fp32.

        Args:
            features: of the keys and values of a rank's positions, of all blocks and microbatches.
            exchanges: forward passes of a block.
            attention: seconds, in all passes.
        """
        ranks, passes = group.ranks, 2 + job.recomputed
        forward, sums = features * job.parameter_bytes * passes, features * 4
        if job.passes_keys:
            hops = (ranks - 1) * (passes + 1) * exchanges
            return max(0.0, group.passing((forward + sums) * (ranks - 1), hops) - attention * (ranks - 1) / ranks)
        gathered = group.seconds(forward * ranks, passes * exchanges)
        return max(0.0, gathered - attention / ranks) + group.seconds(sums * ranks, exchanges)

    def _matmul_seconds(self, kind: int, matmul_type: str, weights: int, tokens: float) -> float:
        """Return the time of a block's matmuls for one microbatch. A small inner dimension is slower."""
        rates = self._machine.matmul_of(matmul_type)
        total = 0.0
        for matrix in self._kinds[kind].matrices:
            inner = matrix.inner / weights if matrix.divides_inner else matrix.inner
            outer = matrix.outer / weights if matrix.divides_outer else matrix.outer
            depth = 3 + rates.half_depth * (1 / inner + 1 / outer + 1 / max(1.0, tokens))
            # Features that no rule divides are computed for the rank's own positions.
            total += 2 * tokens * matrix.copies * matrix.inner * matrix.outer / weights * depth
        return total / (rates.achievable_tflops * 1e12)

    def _tokens(self, job: Workload) -> float:
        """Return the positions of a microbatch that a rank shares only with those that divide its weights."""
        size = job.local_batch if job.pipeline is None else job.pipeline.microbatch_size
        return size * job.seq_len / divided(job.mesh, "sequence")

    def _group(self, mesh: MeshPlan, names: Sequence[str], degree: int | None = None) -> _Group:
        """Return the group of ranks along the dimensions ``names``, or the ``degree`` neighbours among them."""
        machine = self._machine
        inside = 1  # ranks between neighbours of the group
        for dim in reversed(mesh.dims):
            if dim.name in names:
                break
            inside *= mesh.degrees[dim.name]
        ranks = math.prod(mesh.degrees[name] for name in names) if degree is None else degree
        together = max(1, min(ranks, machine.ranks_per_node // inside))
        node, network = machine.links.node, machine.links.network
        start = machine.links.start_us * 1e-6
        if together == ranks:
            return _Group(
                ranks, node.bandwidth_gb_s * 1e9, start + ranks * node.latency_us * 1e-6, node.bandwidth_gb_s * 1e9
            )
        bandwidth = together * network.bandwidth_gb_s
        bandwidth = min(bandwidth, node.bandwidth_gb_s) if together > 1 else bandwidth
        hops = start + ranks / together * network.latency_us * 1e-6
        return _Group(ranks, bandwidth * 1e9, hops, network.bandwidth_gb_s * 1e9)


def divided(mesh: MeshPlan, what: Literal["layers", "batch", "sequence", "weights"]) -> int:
    """Return the number of ranks that divide ``what`` among them."""
    return math.prod(mesh.degrees[dim.name] for dim in mesh.dims if dim.divides == what)


def _shards(mesh: MeshPlan) -> int:
    """Return the number of ranks over which data parallelism shards parameters."""
    return math.prod(mesh.degrees[name] for name in mesh.data_dims("shard"))


def _flops(unit: Unit) -> float:
    return sum(matrix.inner * matrix.outer * matrix.copies for matrix in unit.matrices)
