"""The batch of a trial on the job's mesh: a few short sequences, divided over ranks as the job divides its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from titan_core.api import Batch, BatchPlan, Job, MeshPlan, StepInput, World
from titan_core.api.config.sections import DataSection, TrainingSection
from titan_core.api.parallel.microbatch import AuxiliaryLosses
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.small_copy import positions_to_try
from titan_core.model.trial import zero_extras

_SHORT = 64
"""A job's own sequences are used if they have at most this many positions."""
_DATA = 8
"""Most ranks that see different sequences; further ranks see the same ones again."""
_SEQUENCES = 4
"""Most different sequences of a rank."""


@dataclass(frozen=True)
class TrialBatch:
    """A global batch that repeats a few different sequences equally often, so that one device needs to compute each only
    once, however many ranks there are."""

    job: Job
    """The job with the sizes of this batch, in fp32."""
    whole: Batch
    """The different sequences."""
    rows: tuple[tuple[int, ...], ...]
    """The sequences in each of this rank's microbatches: indices of :attr:`whole`."""
    repeats: float
    """How often the global batch (that of this rank's replica) contains each sequence."""

    def one_device(self) -> Job:
        """Return the job that computes :attr:`whole` on one device, in one microbatch."""
        plan, count = self.job.mesh, len(self.whole.tokens)
        ones = replace(plan, degrees=dict.fromkeys(plan.degrees, 1), view_degrees=dict.fromkeys(plan.view_degrees, 1))
        batch = replace(self.job.batch, global_size=count, local_size=count, microbatches=1, ranks=1)
        return replace(self.job, mesh=ones, batch=batch)

    def inputs(self) -> StepInput:
        """Return this rank's work."""
        batches = [self.whole.map(lambda tensor, rows=rows: tensor[list(rows)]) for rows in self.rows]  # type: ignore[misc]
        return StepInput(batches, step=1, seed=0, target_weight=self._weight(), auxiliary=self._auxiliary(1.0))

    def inputs_of_one_device(self) -> StepInput:
        """Return the work of one device, whose gradients are those of the global batch."""
        # An auxiliary loss has a scale of its own, which the loss's divisor does not change.
        weight = self._weight() / self.repeats
        return StepInput([self.whole], step=1, seed=0, target_weight=weight, auxiliary=self._auxiliary(self.repeats))

    def _weight(self) -> float:
        return float(self.whole.target_weights().sum()) * self.repeats

    def _auxiliary(self, factor: float) -> AuxiliaryLosses:
        return AuxiliaryLosses(factor / (self.whole.tokens.numel() * self.repeats))


def trial_batch(job: AssembledJob, world: World, seed: int) -> TrialBatch:
    """Return the batch of a trial. Each position has a weight of its own, so that no two can be exchanged unnoticed. The
    extra tensors that datasets fill are 0."""
    plan, batch = job.mesh, job.batch
    if any(plan.degrees[dim.name] > 1 for dim in plan.dims if dim.divides == "layers"):
        local, microbatches = batch.local_size, batch.microbatches  # schedules need a certain number of microbatches
    else:
        local, microbatches = min(2, batch.local_size), min(2, batch.microbatches)
    index, ranks = _place(plan, world)
    different, sequences = _largest_divisor(ranks, _DATA), _largest_divisor(local * microbatches, _SEQUENCES)
    first = index % different * sequences
    rows = [first + number % sequences for number in range(local * microbatches)]
    length = _length(job)
    sizes = BatchPlan(batch.ranks * microbatches * local, local, microbatches, batch.ranks, batch.logical_shards, length)
    training = job.section(TrainingSection).model_copy(
        update={"seq_len": length, "mixed_precision_param": "float32", "mixed_precision_reduce": "float32"}
    )
    config = replace(job.config, sections={**job.config.sections, TrainingSection: training})
    whole = _sequences(job, different * sequences, length, seed, world.device)
    return TrialBatch(
        job=replace(job, config=config, batch=sizes),
        whole=whole,
        rows=tuple(tuple(rows[start : start + local]) for start in range(0, len(rows), local)),
        repeats=ranks * local * microbatches / (different * sequences),
    )


def _place(plan: MeshPlan, world: World) -> tuple[int, int]:
    """Return this rank's index among the ranks that see different sequences in one replica, and their number."""
    index, count = 0, 1
    for dim in plan.dims:
        if dim.divides == "batch" and not dim.diverges:
            index, count = index * plan.degrees[dim.name] + world.coordinate(dim.name), count * plan.degrees[dim.name]
    return index, count


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _length(job: Job) -> int:
    """Return a number of positions that the mesh divides as it divides the job's own."""
    own = job.batch.seq_len
    multiple = 2 * math.prod(job.mesh.degrees[dim.name] for dim in job.mesh.dims if dim.divides in ("sequence", "weights"))
    length = -(-positions_to_try(job.model.layout) // multiple) * multiple
    return own if own <= max(_SHORT, length) else length


def _sequences(job: AssembledJob, count: int, length: int, seed: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(job.model.layout.vocab_size, (count, length + 1), generator=generator)
    weights = 0.5 + torch.rand(count, length, generator=generator)
    positions = documents = None
    if job.section(DataSection).document_mask:
        cut = length // 2 - 1
        order = torch.arange(length).expand(count, -1)
        positions, documents = torch.where(order < cut, order, order - cut), (order >= cut).long()
    rows = torch.arange(count)
    extras = zero_extras(job.data.extras, drawn[:, :-1])
    batch = Batch(
        drawn[:, :-1], drawn[:, 1:], weights=weights, positions=positions, documents=documents, rows=rows, extras=extras
    )
    return batch.map(lambda tensor: tensor.contiguous().to(device))
