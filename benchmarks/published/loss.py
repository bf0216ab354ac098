"""The loss of TorchTitan's published runs: cross entropy of the logits of all positions, in fp32, not compiled.

Titan's own loss never holds them. This one stands in for it in :mod:`benchmarks.published.estimated`. TorchTitan did not
compile its loss then ("compiling loss function causes CUDA errors, turning off for now"); with tensor parallelism, torch
computed it on sharded columns (``torch.distributed.tensor.parallel.loss_parallel``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import Batch, ObjectiveFunction, Vocabulary
from titan_core.api.training.batch import IGNORE


class FullLogits(ObjectiveFunction):
    """Cross entropy as ``cross_entropy(logits.float(), targets)`` computes it."""

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        whole = logits.float().flatten(0, -2)
        targets = batch.targets.flatten()
        if vocabulary.group is None:
            return F.cross_entropy(whole, targets, ignore_index=IGNORE, reduction="sum")
        result: Tensor = _ShardedCrossEntropy.apply(whole, targets, vocabulary.group)
        return result


class _ShardedCrossEntropy(torch.autograd.Function):
    """Has the memory, the operators and the communication of ``loss_parallel`` (its numbers are not looked at)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        maximum = logits.amax(-1, keepdim=True)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum
        total = shifted.exp().sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        result = shifted - total.log()
        places = targets.clamp(0, logits.shape[-1] - 1)[:, None]
        picked = result.gather(-1, places)
        dist.all_reduce(picked, group=group)
        ctx.save_for_backward(result, places)
        return -picked.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        result, places = ctx.saved_tensors
        gradient = torch.zeros_like(result)
        gradient.scatter_(-1, places, -1.0)
        return (gradient + result.exp()) * gradients[0], None, None


def full_logits(context: object) -> FullLogits:
    """Build the loss."""
    return FullLogits()
