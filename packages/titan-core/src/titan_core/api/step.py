"""How a step runs forward and backward: one small seam, so that the trainer's loop reads the same for a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from titan_core.api.batch import Batch
from titan_core.api.microbatch import AuxiliaryLosses, Microbatch
from titan_core.api.model_part import ModelPart

_shape_inference: ContextVar[bool] = ContextVar("shape_inference", default=False)


@contextmanager
def shape_inference() -> Iterator[None]:
    """Marks calls of modules that are made for the shapes of their outputs alone, on numbers that mean nothing."""
    token = _shape_inference.set(True)
    try:
        yield
    finally:
        _shape_inference.reset(token)


def is_shape_inference() -> bool:
    """Whether modules are being called for shapes alone, so that hooks on them should ignore their outputs."""
    return _shape_inference.get()


@dataclass(frozen=True)
class StepInput:
    """What a rank computes in one step."""

    batches: Sequence[Batch]
    """Its microbatches."""
    step: int
    """Counted from 1."""
    seed: int
    """``training.seed``."""
    target_weight: float = 1.0
    """The weight of all targets of the *global* batch (where replicas of the weights train apart, of the replica's part of
    it): losses are divided by it, so that gradients may simply be summed over ranks."""
    auxiliary: AuxiliaryLosses | None = None
    """Where auxiliary losses go; ``None`` in an evaluation."""

    def microbatches(self) -> list[Microbatch]:
        """What a part of the model computes, one after another."""
        return [Microbatch(batch, self.step, self.seed, self.auxiliary) for batch in self.batches]


class StepRunner(Protocol):
    """Forward and backward over a rank's microbatches."""

    def __call__(self, inputs: StepInput) -> Tensor:
        """Add the gradient of the loss, divided by ``inputs.target_weight``, to the parameters' gradients.

        Returns:
            This rank's share of the loss, a scalar on the device: the shares of all ranks that see different tokens sum to
            the mean loss of the global batch (0 on a pipeline stage that computes no loss).
        """
        ...

    def evaluate(self, inputs: StepInput) -> Tensor:
        """Forward alone, without gradients.

        Returns:
            This rank's share of the loss, summed over weighted targets: a scalar on the device.
        """
        ...


class GradientAccumulation:
    """The plain step: one part of a model, microbatches one after another."""

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
