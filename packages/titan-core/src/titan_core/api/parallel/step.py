"""Forward and backward pass of a step. The trainer's loop is the same with and without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums, Microbatch, StepCounts
from titan_core.api.parallel.model_part import ModelPart
from titan_core.api.plugins.errors import PartOfContract
from titan_core.api.training.batch import Batch

_shape_inference: ContextVar[bool] = ContextVar("shape_inference", default=False)


@contextmanager
def shape_inference() -> Iterator[None]:
    """Mark module calls that only determine output shapes, on meaningless inputs."""
    token = _shape_inference.set(True)
    try:
        yield
    finally:
        _shape_inference.reset(token)


def is_shape_inference() -> bool:
    """Whether modules are called for output shapes only. Hooks on modules should then ignore their outputs."""
    return _shape_inference.get()


@dataclass(frozen=True)
class StepInput:
    """The work of one rank in one step."""

    batches: Sequence[Batch]
    """The rank's microbatches."""
    step: int
    """Counted from 1."""
    seed: int
    """``training.seed``."""
    target_weight: float | Tensor = 1.0
    """Total weight of the targets in the *global* batch, or in the part of it that this rank's diverging replica trains on.
    Losses are divided by it, so that gradients can be summed over ranks. A scalar on the device in a CUDA graph."""
    auxiliary: AuxiliaryLosses | None = None
    """Collects auxiliary losses; ``None`` in an evaluation."""
    metrics: MetricSums | None = None
    """Collects the objective's metrics; ``None`` if nobody reads them."""
    statistics: StepCounts | None = None
    """Collects statistics (:func:`~titan_core.api.add_statistic`); ``None`` in an evaluation and a step that is repeated."""
    key: Tensor | None = None
    """:attr:`Microbatch.key <titan_core.api.Microbatch.key>` in a CUDA graph, whose numbers are constants; ``None``: from
    seed and step."""

    def microbatches(self) -> list[Microbatch]:
        """Return the microbatches that a part of the model computes, in order."""
        collectors = (self.auxiliary, self.target_weight, self.metrics, self.statistics)
        return [Microbatch(batch, self.step, self.seed, *collectors, self.key) for batch in self.batches]


class StepAbandoned(PartOfContract):
    """A step runner raises it, on all ranks, to abandon the step. The trainer discards the gradients and starts again: with
    the same step, or with the one after :attr:`titan_core.api.Run.state` if the runner has replaced it."""


@runtime_checkable
class StepRunner(Protocol):
    """Runs forward and backward over a rank's microbatches."""

    def __call__(self, inputs: StepInput) -> Tensor:
        """Add the gradient of the loss, divided by ``inputs.target_weight``, to the parameters' gradients.

        Returns:
            This rank's share of the loss, a scalar on the device. The shares of all ranks that see different tokens add up
            to the mean loss of the global batch; a pipeline stage that computes no loss returns 0.

        Raises:
            StepAbandoned: see there.
        """

    def evaluate(self, inputs: StepInput) -> Tensor:
        """Run forward only, without gradients.

        Returns:
            This rank's share of the loss, summed over weighted targets; a scalar on the device.
        """


class GradientAccumulation:
    """The plain step: one model part, and microbatches in sequence."""

    def __init__(self, part: ModelPart) -> None:
        self._part = part

    def __call__(self, inputs: StepInput) -> Tensor:
        """See :class:`StepRunner`."""
        losses = []
        for microbatch in inputs.microbatches():
            loss = self._part.forward_loss(microbatch) / inputs.target_weight
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, inputs: StepInput) -> Tensor:
        """See :class:`StepRunner`."""
        return torch.stack([self._part.forward_loss(microbatch) for microbatch in inputs.microbatches()]).sum()
