"""How a step runs forward and backward: one small seam, so that the trainer's loop reads the same for a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from titan_core.api.batch import Batch
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


class StepRunner(Protocol):
    """Forward and backward over a rank's microbatches."""

    def __call__(self, microbatches: Sequence[Batch], num_targets: int) -> Tensor:
        """Add the gradient of (loss summed over targets) / ``num_targets`` to the parameters' gradients.

        Args:
            num_targets: target tokens of the *global* batch, so that gradients may simply be summed over ranks (where copies
                of the weights train apart, of the copy's part of it).

        Returns:
            This rank's share of the loss, a scalar on the device: the shares of all ranks that see different tokens sum to
            the mean loss of the global batch (0 on a pipeline stage that computes no loss).
        """
        ...

    def evaluate(self, microbatches: Sequence[Batch]) -> Tensor:
        """Forward alone, without gradients.

        Returns:
            This rank's share of the loss, summed over targets: a scalar on the device.
        """
        ...


class GradientAccumulation:
    """The plain step: one part of a model, microbatches one after another."""

    def __init__(self, part: ModelPart) -> None:
        self._part = part

    def __call__(self, microbatches: Sequence[Batch], num_targets: int) -> Tensor:
        """See :class:`StepRunner`."""
        losses = []
        for batch in microbatches:
            loss = self._part.forward_loss(batch) / num_targets
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> Tensor:
        """See :class:`StepRunner`."""
        return torch.stack([self._part.forward_loss(batch) for batch in microbatches]).sum()
