"""Rough memory and time of a job on a machine, from the model's layout and the mesh alone. Free of torch.

It ranks thousands of candidates, so that only a few need a simulation. It knows what a mesh dimension divides (layers, the
batch, the sequence, weights, experts) and no parallelism. All sizes are per rank, in bytes, and all times in seconds of a
step; the worst rank of a pipeline counts. :class:`_Rank` has a method for each term, whose docstring is its formula:

====================  ===========================================================================================
memory                state, gathered, activations, logits and loss; what the allocator loses; the CUDA context
computation           matmuls, attention, pointwise traffic; the host that issues them; the optimizer's update
waits                 collectives that nothing hides: regions, keys and values, stages, experts; the idle pipeline
data parallelism      gathers and reductions, as far as they take longer than the computation that hides them
====================  ===========================================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from titan_core.api import MeshPlan, Mixer, OptimizerCosts, PipelineCosts
from titan_simulate.costs import ADAMW
from titan_simulate.hardware.machine import Machine, Matmul
from titan_simulate.plan.groups import Group, group_along
from titan_simulate.plan.model_sizes import Held, Matrix, ModelSizes, Unit, keys_of

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
    exchanges_heads: int = 1
    exchanged_rows: float | None = None
    """Rows that ranks exchange for experts, by those that tokens choose, if their number is fixed."""
    host_waits: float = 0.0
    """Waits of the host in each forward pass of a block with experts."""
    pipeline: PipelineCosts | None = None
    optimizer: OptimizerCosts = ADAMW


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
    copied: int
    """Parameters that another stage has too, and updates."""


class Arithmetic:
    """Guesses the cost of jobs that train one model on one machine."""

    def __init__(self, sizes: ModelSizes, machine: Machine, imbalance: float = 1.0) -> None:
        """
        Args:
            imbalance: rows that the busiest rank's experts compute, by the mean of all ranks that divide them.
        """
        self.sizes, self.machine, self.imbalance = sizes, machine, imbalance
        self.kinds: list[Unit] = []
        """Units that differ. Models repeat blocks."""
        self._kind_of: dict[str, int] = {}
        for name, unit in sizes.units.items():
            if unit not in self.kinds:
                self.kinds.append(unit)
            self._kind_of[name] = self.kinds.index(unit)
        flops = [_flops(unit) for unit in self.kinds]
        total = sum(flops[kind] for kind in self._kind_of.values()) or 1.0
        self.flops = [each / total for each in flops]
        """By kind: share of the model's matmul operations."""
        self._held_before: dict[object, tuple[_Held, ...]] = {}
        self.block_seconds = cache(self._block_seconds)

    def guess(self, job: Workload) -> Guess:
        """Return the memory and the time of the worst rank."""
        ranks = [_Rank(self, job, held) for held in self._ranks(job.pipeline)]
        memory = max((rank.memory() for rank in ranks), key=lambda one: sum(one.values()))
        seconds = max((rank.seconds() for rank in ranks), key=lambda one: sum(one.values()))
        return Guess(memory, seconds)

    def outlook(self, job: Workload) -> float:
        """Return about how long a step of ``job`` takes, as the mean of the ranks that divide the layers, who never wait;
        infinity if it does not fit. It stands for any pipeline, of which ``job`` has none."""
        rank, layers = _Rank(self, job, *self._ranks(None)), divided(job.mesh, "layers")
        memory = rank.memory()
        held = (memory[STATE] + memory["gathered"]) / layers + memory["activations"] + memory["logits and loss"]
        fits = held + memory["context"] <= self.machine.memory_gib * GIB
        return sum(rank.seconds().values()) / layers if fits else math.inf

    def _ranks(self, pipeline: PipelineCosts | None) -> tuple[_Held, ...]:
        """Return what the ranks of a pipeline hold, without repetition."""
        key = None if pipeline is None else (pipeline.stages, pipeline.rank_of, pipeline.alive)
        if key in self._held_before:
            return self._held_before[key]
        last = list(self.sizes.units)[-1]
        names: dict[int, list[str]] = {0: list(self.sizes.units)}
        copied: Counter[int] = Counter()
        if pipeline is not None:
            names = {}
            for stage, holder in zip(pipeline.stages, pipeline.rank_of, strict=True):
                names.setdefault(holder, []).extend(stage)
                copied[holder] += sum(size for unit, of, size in self.sizes.ties if unit in stage and of not in stage)
        most: dict[tuple[object, ...], _Held] = {}
        for number, units in names.items():
            blocks = Counter(self._kind_of[name] for name in units if name in self.sizes.blocks)
            others = tuple(self._kind_of[name] for name in units if name not in self.sizes.blocks)
            alive = 1.0 if pipeline is None else pipeline.alive[number]
            held = _Held(tuple(sorted(blocks.items())), others, last in units, alive, copied[number])
            same = (held.blocks, held.others, held.head, held.copied)
            if same not in most or most[same].alive < alive:
                most[same] = held
        self._held_before[key] = tuple(most.values())
        return self._held_before[key]

    def _block_seconds(
        self, kind: int, matmul_type: str, weights: int, tokens: float, views: int, width: int, imbalance: float
    ) -> float:
        """Return the time of a block's matmuls for one microbatch. A small inner dimension is slower::

        3 products x 2 x tokens x inner x outer / weights x (1 + half_depth / inner dimension of the product) / rate
        """
        rates = self.machine.matmul_of(matmul_type)
        total = of_experts = 0.0
        for matrix in self.kinds[kind].matrices:
            inner = matrix.inner / weights if matrix.divides_inner else matrix.inner
            outer = matrix.outer / weights if matrix.divides_outer else matrix.outer
            if matrix.experts:
                of_experts += self._expert_seconds(matrix, rates, tokens / weights, views, width) * imbalance
                continue
            depth = 3 + rates.half_depth * (1 / inner + 1 / outer + 1 / max(1.0, tokens))
            # Features that no rule divides are computed for the rank's own positions.
            total += 2 * tokens * matrix.copies * matrix.inner * matrix.outer / weights * depth
        return total / (rates.achievable_tflops * 1e12) + of_experts

    def _expert_seconds(self, matrix: Matrix, rates: Matmul, tokens: float, views: int, width: int) -> float:
        """Return the time of the products of a rank's experts. Of few rows each, most of a tile is empty::

            rows of an expert = tokens x chosen experts x views / experts
            2 x rows x inner x outer x experts / views x (2 x rows of its tiles / rows + 1 + small dimensions) / rate

        and no less than the time to read the experts' weights twice, and to write their gradients.
        """
        held, rows = matrix.experts / views, max(1.0, tokens * matrix.copies * views / matrix.experts)
        padded = max(rates.tile_rows / rows, 1 + rates.tile_rows / (2 * rows))  # on average, the last tile is half empty
        depth = 2 * padded + 1 + rates.half_depth * (1 / matrix.inner + 1 / matrix.outer + 1 / rows)
        weights = held * matrix.inner * matrix.outer
        memory = self.machine.memory
        moving = 3 * weights * width / (memory.bandwidth_gb_s * 1e9 * memory.efficiency)
        return max(2 * rows * weights * depth / (rates.achievable_tflops * 1e12), moving)


class _Rank:
    """A rank of a job: the terms of its memory and of its time."""

    def __init__(self, arithmetic: Arithmetic, job: Workload, held: _Held) -> None:
        self._arithmetic, self._job, self._held = arithmetic, job, held
        self._machine, self._sizes, self._mesh = arithmetic.machine, arithmetic.sizes, job.mesh
        kinds, pipeline = arithmetic.kinds, job.pipeline
        self._blocks = [(kinds[kind], count) for kind, count in held.blocks]
        self._laps = sum(count for _, count in held.blocks)
        """Blocks of this rank."""
        self._weights, self._sequence = divided(job.mesh, "weights"), divided(job.mesh, "sequence")
        self._ring = self._sequence // job.exchanges_heads
        """Ranks that divide the sequence and do not exchange heads."""
        self._shards = _shards(job.mesh)
        self._width = job.parameter_bytes
        divides = any(job.mesh.view_degrees[view.name] > 1 for view in job.mesh.views if view.shards_parameters)
        self._imbalance = arithmetic.imbalance if divides else 1.0
        """Without division, each rank computes its own rows, however they are chosen."""
        self._count = job.microbatches if pipeline is None else pipeline.microbatches
        size = job.local_batch if pipeline is None else pipeline.microbatch_size
        self._tokens = size * job.seq_len / self._sequence
        """Positions of a microbatch that this rank shares only with those that divide its weights."""
        self._again = 1.0 + job.recomputed / 3
        """Computation, by that without recomputation: forward is a third of it."""
        self._passes = (4 + 2 * job.recomputed) * self._count
        """Collectives around a region of a block: two in each pass of forward, backward and recomputation."""
        self._whole, self._experts, self._largest, self._exact = self._parameters()
        views = _views(job.mesh)
        in_matrices = sum(
            count * _on_rank(unit, self._weights, views) * _share_of_matrices(unit) for unit, count in self._blocks
        )
        self._in_matrices = in_matrices / max(1.0, self._whole)
        """Share of this rank's parameters that are matrices of blocks."""

    def _parameters(self) -> tuple[float, float, float, float]:
        """Return the parameters of this rank, before data parallelism divides them; those of its experts; those of its
        largest unit; and those that compute in fp32. Of a unit: ``replicated + divided / weights + experts / views``."""
        weights, views = self._weights, _views(self._mesh)
        whole = on_views = largest = exact = 0.0
        for kind, count in (*self._held.blocks, *((kind, 1) for kind in self._held.others)):
            unit = self._arithmetic.kinds[kind]
            experts = unit.experts / views + unit.divided_experts / (views * weights)
            each = _on_rank(unit, weights, views)
            whole, on_views, largest = whole + count * each, on_views + count * experts, max(largest, each)
            exact += count * _on_rank(unit.exact, weights, views)
        copied = self._held.copied / weights
        return whole + copied, on_views, max(largest, copied), exact

    # Memory

    def memory(self) -> dict[str, float]:
        """Return bytes by kind."""
        found = {
            STATE: self._state(),
            "gathered": self._gathered(),
            "activations": self._activations(),
            "logits and loss": self._logits(),
        }
        # What the update needs beside state, where activations were.
        found["update"] = max(0.0, self._job.optimizer.workspace_bytes - found["activations"] - found["logits and loss"])
        fragments = _FRAGMENTS if self._machine.allocator.caching else 0.0
        return {**found, "allocator": sum(found.values()) * fragments, "context": self._machine.context_gib * GIB}

    def _state(self) -> float:
        """``held x (4 weights + 4 gradients + optimizer)``, with the parameters held after all divisions, without the
        optimizer for what another stage updates. Experts are divided by views first, and by data parallelism, with the ranks
        that views borrow from other dimensions, as far as it has more ranks. Offloaded, it is on the host."""
        of_experts = max(1, self._shards * _folded(self._mesh) // _views(self._mesh))
        held = (self._whole - self._experts) / self._shards + self._experts / of_experts
        copied = self._held.copied / self._weights / self._shards
        if self._job.offloads:
            return 0.0
        costs = self._job.optimizer
        of_matrices = costs.state_bytes if costs.matrix_state_bytes is None else costs.matrix_state_bytes
        state = costs.state_bytes + self._in_matrices * (of_matrices - costs.state_bytes)
        return held * (8 + state) - copied * costs.state_bytes

    def _gathered(self) -> float:
        """Weights that data parallelism gathers, and gradients in the type of their reduction: of two units (one is gathered
        while another computes) and of one, or of the whole rank if they stay gathered. What computes in fp32 stays."""
        job, whole, largest = self._job, self._whole, self._largest
        if self._shards == 1 and job.parameter_bytes >= 4:
            return 0.0
        parameters = (whole if job.parameters_stay else min(whole, 2 * largest)) * job.parameter_bytes
        exact = self._exact * max(0, 4 - job.parameter_bytes)
        return parameters + exact + (whole if job.gradients_stay else largest) * job.reduce_bytes

    def _activations(self) -> float:
        """``tokens x width x (alive x (inputs of blocks + kept x features of blocks) + the rest of one block)``, where
        ``alive`` counts microbatches in flight; and the keys and values of other positions that a block attends to."""
        job, weights = self._job, self._weights
        features = [(self._features(unit), count) for unit, count in self._blocks]
        inputs = self._laps * self._sizes.dim / weights
        kept = self._held.alive * (inputs + job.kept * sum(count * each for each, count in features))
        largest = max((each for each, _ in features), default=0.0)
        working = largest * (1.0 - job.kept) * (0.75 if job.fused else 1.0)
        keys = max((self._keys_of(unit) for unit, _ in self._blocks), default=0.0) / weights
        held = 2 if job.passes_keys else self._ring  # of another rank and the next one, or of all
        exchanged = 0.0 if self._ring == 1 else keys * (self._width + 4) * held  # gradients are summed in fp32
        return self._tokens * (self._width * (kept + working) + exchanged)

    def _features(self, unit: Unit) -> float:
        """Return the features of a position that a block computes, with the empty places of buffers of a fixed size."""
        padding = 0.0 if self._job.exchanged_rows is None else (self._job.exchanged_rows - 1) * unit.of_experts
        return unit.shared + (unit.split + padding) / self._weights

    def _logits(self) -> float:
        """``positions of a chunk x vocabulary / weights x (fp32 logits, logits and their gradient)``, on the last stage."""
        if not self._held.head:
            return 0.0
        vocabulary = self._sizes.vocab_size / self._weights
        chunk = min(self._tokens, max(1.0, _CHUNK / 4 / vocabulary))
        return chunk * vocabulary * (4 + 2 * self._width)

    # Time

    def seconds(self) -> dict[str, float]:
        """Return seconds by kind; names of mesh dimensions and views for their collectives."""
        matmuls, attention = self._matmuls(), self._attention()
        compute = matmuls + attention + self._pointwise()
        recomputation = compute * (1 - 1 / self._again)
        found = {
            "compute": compute - recomputation,
            "recomputation": recomputation,
            "host": max(0.0, self._issue() - compute) + self._host_waits(),
            **self._waits(matmuls, attention),
        }
        if self._job.pipeline is not None:
            found["idle"] = sum(found.values()) * self._job.pipeline.idle
        for name, longer in self._data_parallel(compute).items():
            found[name] = found.get(name, 0.0) + longer
        found["update"] = self._update()
        return found

    def _matmuls(self) -> float:
        """Those of blocks at the rate of their type, with recomputation; those of embedding and head once."""
        job, arithmetic = self._job, self._arithmetic
        sizes = job.matmul_type, self._weights, self._tokens, _views(job.mesh), self._width, self._imbalance
        of_blocks = sum(arithmetic.block_seconds(kind, *sizes) * count for kind, count in self._held.blocks)
        share = sum(arithmetic.flops[kind] for kind in self._held.others)
        others = share * self._sizes.matmul_flops * self._tokens * self._count / self._weights
        rate = self._machine.matmul_of(job.wide_type).achievable_tflops * 1e12
        return of_blocks * (self._count * self._again) + others / rate

    def _attention(self) -> float:
        """``forward x (1 + recomputed) / rate of forward + 2.5 x forward / rate of backward``: of a triangle, forward is a
        sixth of what a model's definition counts for mixers, and backward 2.5 times that."""
        rates, blocks = self._machine.attention, max(1, len(self._sizes.blocks))
        forward = self._sizes.mixer_flops * (self._tokens * self._count / self._weights) * self._laps / blocks / 6
        seconds = forward * (1 + self._job.recomputed) / (rates.forward_tflops * rates.causal * 1e12)
        return seconds + 2.5 * forward / (rates.backward_tflops * rates.causal * 1e12)

    def _pointwise(self) -> float:
        """``features x tokens x width x times that they move / bandwidth``: 3 times in compiled code, else 8."""
        features = sum(self._features(unit) * count for unit, count in self._blocks)
        traffic = features * self._tokens * self._count * self._width
        return traffic * ((3.0 if self._job.fused else 8.0) * self._again) / self._bandwidth

    def _issue(self) -> float:
        """The host's time: ``blocks x microbatches x operators x time of an operator``."""
        host = self._machine.host
        each = host.compiled_kernel_us / 5 if self._job.fused else host.operator_us
        return self._laps * self._count * _OPERATORS * self._again * each * 1e-6

    def _host_waits(self) -> float:
        """``blocks with experts x forward passes x waits x (a copy to the host, and the next operator)``."""
        passes = sum(count for unit, count in self._blocks if unit.routed) * self._count * (1 + self._job.recomputed)
        each = self._machine.memory.kernel_us + self._machine.host.operator_us
        return passes * self._job.host_waits * each * 1e-6

    def _update(self) -> float:
        """``traffic x parameters / bandwidth``, and ``operations of all matrices of the stage / its ranks / rate``.
        Offloaded, the traffic is at the rate of an optimizer on the host."""
        costs, held = self._job.optimizer, self._whole / self._shards
        seconds = self._computed_matrices() + self._exchanged_matrices()
        if self._job.offloads:
            return 16 / 28 * costs.traffic * held / (self._machine.host.optimizer_gb_s * 1e9) + seconds
        return costs.traffic * held / self._bandwidth + seconds

    def _computed_matrices(self) -> float:
        flops, mesh = self._job.optimizer.matrix_flops, self._mesh
        if flops is None:
            return 0.0
        ranks = math.prod(mesh.degrees[dim.name] for dim in mesh.dims if dim.divides != "layers" and not dim.diverges)
        total = sum(
            count * number * flops(rows, columns) for unit, count in self._blocks for rows, columns, number in unit.weights
        )
        rate = self._machine.matmul_of(self._job.optimizer.matrix_type).achievable_tflops * 1e12
        return total / ranks / rate

    def _exchanged_matrices(self) -> float:
        """What a rank sends goes to all ranks over which its matrices are divided; no computation hides it."""
        sent = self._job.optimizer.exchanged_bytes * self._in_matrices * self._whole / self._shards
        if not sent:
            return 0.0
        names = [*self._mesh.data_dims("shard"), *(dim.name for dim in self._mesh.dims if dim.divides == "weights")]
        return group_along(self._machine, self._mesh, names).seconds(sent, 2)

    @property
    def _bandwidth(self) -> float:
        memory = self._machine.memory
        return memory.bandwidth_gb_s * 1e9 * memory.efficiency

    # Collectives

    def _waits(self, matmuls: float, attention: float) -> dict[str, float]:
        """Return collectives that nothing hides, by dimension and view."""
        found = {}
        for dim in self._mesh.dims:
            if self._mesh.degrees[dim.name] < 2:
                continue
            group = group_along(self._machine, self._mesh, [dim.name])
            if dim.divides == "weights":
                found[dim.name] = self._regions(group, matmuls)
            elif dim.divides == "sequence":
                found[dim.name] = self._keys(dim.name, attention) + self._heads(dim.name)
            elif dim.divides == "layers" and self._job.pipeline is not None:
                found[dim.name] = self._stages(group, self._job.pipeline)
        for view in self._mesh.views:
            degree = self._mesh.view_degrees[view.name]
            if degree > 1 and view.shards_parameters:
                found[view.name] = self._exchanged_experts(group_along(self._machine, self._mesh, view.borrows, degree))
        return found

    def _regions(self, group: Group, matmuls: float) -> float:
        """Features are gathered before each region of a block, and reduced after it; likewise before the head. Matmuls hide
        it, if they overlap, except for the share of one rank."""
        calls = self._passes * (sum(unit.regions * count for unit, count in self._blocks) + 1)
        seconds = group.seconds(self._tokens * self._sizes.dim * self._width * calls, calls)
        hidden = min(seconds, matmuls) * (1 - 1 / group.ranks) if self._job.overlaps_matmuls else 0.0
        return seconds - hidden

    def _keys(self, dim: str, attention: float) -> float:
        """Keys and values of a rank's positions go to all ranks that divide the sequence (:func:`exchange_seconds`). Ranks
        that exchange heads do so first, and then hold a share of the heads, of the positions of all of them."""
        if self._ring == 1:
            return 0.0
        features = sum(self._keys_of(unit) * count for unit, count in self._blocks) / self._weights
        group = group_along(self._machine, self._mesh, [dim], stride=self._job.exchanges_heads)
        return exchange_seconds(self._job, group, self._tokens * features * self._count, self._laps * self._count, attention)

    def _keys_of(self, unit: Unit) -> float:
        """Return the features of the keys and values that a ring exchanges, per position: within a window, only of those
        before a rank's two chunks that the window covers."""
        others = self._job.seq_len * (self._ring - 1) / self._ring
        windows = [math.inf if mixer.window is None else 2.0 * mixer.window for mixer in unit.mixers]
        return sum(
            keys_of(mixer, self._sizes.dim) * min(1.0, covered / max(1.0, others))
            for mixer, covered in zip(unit.mixers, windows, strict=True)
        )

    def _heads(self, dim: str) -> float:
        """Queries, keys and values are exchanged before attention, and its results after it; likewise their gradients."""
        degree = self._job.exchanges_heads
        group = group_along(self._machine, self._mesh, [dim], degree)
        features = sum(self._traded(mixer) * count for unit, count in self._blocks for mixer in unit.mixers)
        passes = (2 + self._job.recomputed) * self._count
        return group.exchange(self._tokens * features * self._width * passes, 2 * self._laps * passes)

    def _traded(self, mixer: Mixer) -> float:
        """Return the features of a position of which a rank gives the other ranks theirs. Key heads are repeated if they are
        too few."""
        if mixer.heads is None or mixer.key_heads is None:
            return 0.0
        keys = math.lcm(max(1, mixer.key_heads // self._weights), self._job.exchanges_heads)
        return self._sizes.dim * (2 / self._weights + 2 * keys / mixer.heads)

    def _stages(self, group: Group, pipeline: PipelineCosts) -> float:
        """Hidden states pass on from stage to stage, and their gradients back."""
        crossings = 2 * len(pipeline.stages) / group.ranks * self._count
        return group.passing(self._tokens * self._sizes.states * self._sizes.dim * self._width * crossings, crossings)

    def _exchanged_experts(self, group: Group) -> float:
        """``tokens x chosen experts x width``, of which ``(ranks - 1) / ranks`` leave the rank, are sent to their experts,
        and the results back. The busiest rank receives more, unless buffers have a fixed size."""
        routed = sum(unit.routed * count for unit, count in self._blocks) / self._weights
        rows = self._imbalance if self._job.exchanged_rows is None else self._job.exchanged_rows
        calls = self._passes * sum(count for unit, count in self._blocks if unit.routed)
        return group.exchange(self._tokens * routed * self._width * self._passes * rows, calls)

    def _data_parallel(self, compute: float) -> dict[str, float]:
        """Return by how much gathers and reductions take longer than ``compute``, which hides them, by dimensions.

        Sharded: ``parameters x (gathers x width + reductions x bytes of a gradient)``; replicated: twice the gradients of a
        shard. A microbatch gathers twice and reduces once, unless parameters or gradients stay.
        """
        job, mesh = self._job, self._mesh
        gathers = 1.0 if job.parameters_stay else 2.0 * self._count
        reductions = 1.0 if job.gradients_stay else float(self._count)
        reduced = self._whole * job.reduce_bytes + self._exact * max(0, 4 - job.reduce_bytes)
        gathered = self._whole * self._width + self._exact * max(0, 4 - self._width)
        size = {
            "shard": gathers * gathered + reductions * reduced,
            "replicate": 2 * reduced / self._shards * reductions,
        }
        calls = {"shard": (gathers + reductions) * self._laps, "replicate": reductions * self._laps}
        longer, free = {}, compute
        for how in ("shard", "replicate"):
            names = mesh.data_dims(how)
            seconds = group_along(self._machine, mesh, names).seconds(size[how], calls[how])
            if seconds > free:
                longer["+".join(name for name in names if mesh.degrees[name] > 1)] = seconds - free
            free = max(0.0, free - seconds)
        return longer


def _share_of_matrices(unit: Unit) -> float:
    return sum(rows * columns * number for rows, columns, number in unit.weights) / max(1, unit.parameters)


def _on_rank(held: Held, weights: int, views: int) -> float:
    """Return the parameters of a rank."""
    experts = held.experts / views + held.divided_experts / (views * weights)
    return held.replicated + held.divided / weights + experts


def exchange_seconds(job: Workload, group: Group, features: float, exchanges: float, attention: float) -> float:
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


def divided(mesh: MeshPlan, what: Literal["layers", "batch", "sequence", "weights"]) -> int:
    """Return the number of ranks that divide ``what`` among them."""
    return math.prod(mesh.degrees[dim.name] for dim in mesh.dims if dim.divides == what)


def _shards(mesh: MeshPlan) -> int:
    """Return the number of ranks over which data parallelism shards parameters."""
    return math.prod(mesh.degrees[name] for name in mesh.data_dims("shard"))


def _views(mesh: MeshPlan) -> int:
    """Return the number of ranks over which views shard parameters."""
    return math.prod(mesh.view_degrees[view.name] for view in mesh.views if view.shards_parameters)


def _folded(mesh: MeshPlan) -> int:
    """Return the number of ranks that divide weights and that views with parameters borrow."""
    views = [view for view in mesh.views if view.shards_parameters and mesh.view_degrees[view.name] > 1]
    return math.prod(mesh.degrees[name] for name in {name for view in views for name in mesh.folded(view)})


def _flops(unit: Unit) -> float:
    return sum(matrix.inner * matrix.outer * matrix.copies for matrix in unit.matrices)
