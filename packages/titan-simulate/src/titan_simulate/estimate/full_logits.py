"""The loss as other trainers compute it: from the logits of all positions, in fp32.

Titan's own loss never holds them. This one stands in for it (``titan estimate --full-logits``), to compare with
measurements of such trainers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_core.api.batch import IGNORE, Batch
from titan_core.api.objective import ObjectiveFunction
from titan_core.api.vocabulary import Vocabulary


@dataclass
class FullLogits(ObjectiveFunction):
    """Cross entropy of all logits in fp32, as ``cross_entropy(logits.float(), targets)`` computes it."""

    compiled: bool = False
    """Whether the compiler fuses the loss: then only the logits and their gradient exist, not the log probabilities."""
    per_position = False  # all positions at once

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.objective.ObjectiveFunction`."""
        whole = logits.float().flatten(0, -2)
        del logits
        targets = batch.targets.flatten()
        if vocabulary.group is None and not self.compiled:
            return F.cross_entropy(whole, targets, ignore_index=IGNORE, reduction="sum")
        result: Tensor = _CrossEntropy.apply(whole, targets, vocabulary.group, not self.compiled)
        return result


class _CrossEntropy(torch.autograd.Function):
    """Has the memory and the communication of a loss on sharded columns, or of a fused one."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, keep: bool) -> Tensor:
        maximum = logits.amax(-1)
        if group is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum[:, None] if keep else logits
        total = shifted.exp().sum(-1) if keep else shifted.logsumexp(-1)
        picked = shifted.gather(-1, targets.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
        if group is not None:
            dist.all_reduce(total, group=group)
            dist.all_reduce(picked, group=group)
        ctx.save_for_backward(shifted - total.log()[:, None] if keep else logits, targets, total)
        return (total - picked).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        saved, _, total = ctx.saved_tensors
        gradient = torch.sub(saved, total[:, None]).exp_()
        return gradient.mul_(gradients[0]), None, None, None
