"""A model that is not trained, with which the objective compares the trained one: a reference policy, a teacher.

It goes through the job's own transforms on the job's own mesh, so it is divided like the trained model, by any parallelism.
It has its own parts, which no optimizer, checkpoint or observer sees: each start builds it from its own weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titan_core.api import (
    Batch,
    Extra,
    ModelPart,
    ObjectiveFunction,
    StepInput,
    StepRunner,
    Vocabulary,
    World,
)
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.errors import shown
from titan_core.loop.build import build_step_runner
from titan_core.loop.stored_models import load_pretrained
from titan_core.model.build import build_parts

_PREFIX = "reference/"
"""Begins the names of the reference model's results while the batch transforms of the trained model are still to come: they
have been divided already, as the reference model's batches were."""


def with_reference_model(job: AssembledJob, world: World, runner: StepRunner, parts: Sequence[ModelPart]) -> StepRunner:
    """Return a runner that adds to each batch what the job's reference model computes, and then calls ``runner``; ``runner``
    itself if the job has none."""
    if job.reference is None:
        return runner
    parts[0].batch_transforms += (_reveal,)  # after those that divide the batch
    return WithReferenceModel(job.reference, world, runner, parts[0])


class WithReferenceModel:
    """A step runner that computes the reference model first: for each microbatch, so that memory holds the results of one,
    or for all of those that a pipeline computes together."""

    def __init__(self, job: AssembledJob, world: World, runner: StepRunner, trained: ModelPart) -> None:
        """
        Args:
            job: that of the reference model.
            trained: the part of the trained model that transforms its batches.
        """
        self._runner, self._trained = runner, trained
        self._parts = build_parts(job, world.mesh, world.device, world=world)
        load_pretrained(job, world, self._parts)
        self._recorders = []
        for part in self._parts:
            part.module.requires_grad_(False).eval()
            part.objective = _Recorder((*part.wrapped_objectives, part.objective)[0], job)
            self._recorders.append(part.objective)
        self._reference = build_step_runner(job, world, self._parts)

    def __call__(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`."""
        return torch.stack([self._runner(self._completed(one)) for one in self._apart(inputs)]).sum()

    def evaluate(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`."""
        return torch.stack([self._runner.evaluate(self._completed(one)) for one in self._apart(inputs)]).sum()

    def _apart(self, inputs: StepInput) -> list[StepInput]:
        """Return the inputs of the parts of a step that the runner may compute one after the other: gradients add up."""
        if not isinstance(self._runner, GradientAccumulation):
            return [inputs]
        return [replace(inputs, batches=[batch]) for batch in inputs.batches]

    def _completed(self, inputs: StepInput) -> StepInput:
        """Return ``inputs`` with the results of the reference model, on the ranks that compute the loss."""
        self._reference.evaluate(replace(inputs, auxiliary=None, metrics=None, statistics=None))
        for part in self._parts:
            for finish in part.after_evaluation:
                finish()
        chunks = [found for recorder in self._recorders for found in recorder.taken()]
        if not chunks:
            return inputs
        shape = self._trained.transformed(inputs.batches[0]).tokens.shape
        whole = _joined(chunks, positions=shape[1])
        sizes = [len(batch.tokens) for batch in inputs.batches]
        rows = {name: tensor.split(sizes) for name, tensor in whole.items()}
        return replace(inputs, batches=[_with(batch, rows, number) for number, batch in enumerate(inputs.batches)])


class _Recorder(ObjectiveFunction):
    """Keeps what an objective needs of the reference model's logits. Its own loss is 0."""

    def __init__(self, objective: ObjectiveFunction, job: AssembledJob) -> None:
        self._objective, self._build = objective, job.objective.build
        self.vocabulary_sharded = objective.vocabulary_sharded
        self._found: list[Mapping[str, Tensor]] = []

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        found = self._objective.of_reference(logits, batch, vocabulary)
        if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
            raise self._build.wrong(f"made an objective whose of_reference returned {shown(found)}, not tensors by name")
        for name, tensor in found.items():
            if tensor.shape[:2] != batch.tokens.shape:
                form = f"{name!r} of shape {list(tensor.shape)} for tokens of shape {list(batch.tokens.shape)}"
                raise self._build.wrong(
                    f"made an objective whose of_reference returned {form}; it must be [batch, seq, ...]"
                )
        self._found.append(found)
        return logits.new_zeros((), dtype=torch.float32)

    def taken(self) -> list[Mapping[str, Tensor]]:
        """Return what was found since the last call, in the order of microbatches and of the chunks of their positions."""
        found, self._found = self._found, []
        return found


def _joined(chunks: Sequence[Mapping[str, Tensor]], positions: int) -> dict[str, Tensor]:
    """Return the results of all sequences, ``[sequences, positions, ...]``, from those of chunks of microbatches."""
    microbatches: list[list[Mapping[str, Tensor]]] = [[]]
    for chunk in chunks:
        done = sum(next(iter(one.values())).shape[1] for one in microbatches[-1])
        if done == positions:
            microbatches.append([])
        microbatches[-1].append(chunk)
    rows = [{name: torch.cat([one[name] for one in found], dim=1) for name in found[0]} for found in microbatches]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _with(batch: Batch, rows: Mapping[str, Sequence[Tensor]], number: int) -> Batch:
    hidden = {f"{_PREFIX}{name}": Extra(tensors[number], sequence=False) for name, tensors in rows.items()}
    return replace(batch, extras={**batch.extras, **hidden})


def _reveal(batch: Batch) -> Batch:
    """Give the results their names, now that the batch is divided like them."""
    shown = {
        name.removeprefix(_PREFIX): replace(extra, sequence=True) if name.startswith(_PREFIX) else extra
        for name, extra in batch.extras.items()
    }
    return replace(batch, extras=shown)
