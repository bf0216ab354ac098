"""Metrics that an objective reports beside the loss, such as an accuracy or the parts of a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_core.api.parallel.microbatch import MetricSums, current_microbatch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_metric(loss: Tensor, name: str, values: Tensor, weights: Tensor) -> Tensor:
    """Report the mean of ``values``, weighted by ``weights``, over the global batch of a step or over a validation.

    The weights say what the mean is over: :meth:`Batch.target_weights() <titan_core.api.Batch.target_weights>` for a mean
    over target tokens as the loss is, or ones ``[batch]`` for a mean over sequences. Both sums are added up in fp64 over
    chunks of positions, microbatches, ranks and pipeline stages, so the mean is the same on any mesh. A step counts them in
    its backward pass, so that neither recomputation nor an observer's forward passes count twice. Outside a step and a
    validation the function does nothing.

    Args:
        loss: the loss that the objective is about to return.
        name: one of the objective's :attr:`~titan_core.api.ObjectiveFunction.metrics`. It is logged as ``objective/NAME``.
        values: any shape; ignored where the weight is 0. Gradients do not pass through them.
        weights: like ``values``, at least 0.

    Returns:
        ``loss``, unchanged, for the objective to return.
    """
    microbatch = current_microbatch()
    if microbatch is None or microbatch.metrics is None:
        return loss
    of = weights.detach().double()
    sums = torch.stack((torch.where(of > 0, values.detach().double() * of, 0.0).sum(), of.sum()))
    if not torch.is_grad_enabled():
        microbatch.metrics.add(name, sums)
        return loss
    result: Tensor = _Counted.apply(loss, sums, name, microbatch.metrics)
    return result


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, sums: Tensor, name: str, metrics: MetricSums) -> Tensor:
        ctx.pending = (name, sums, metrics)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.pending is not None:  # schedules may compute gradients of inputs and of weights separately
            name, sums, metrics = ctx.pending
            ctx.pending = None
            metrics.add(name, sums)
        return gradients[0], None, None, None
