"""Cross entropy on logits whose vocabulary is divided over ranks, which never gathers them (Shoeybi et al.,
arXiv 1909.08053, section 3). torch's own ``loss_parallel`` has to be entered around the backward pass too, which is not the
loss's to do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api.batch import IGNORE


class VocabularyParallelLoss:
    """As :func:`titan_core.api.loss.cross_entropy_sum`, of this rank's columns of the logits."""

    def __init__(self, group: dist.ProcessGroup, vocab_size: int) -> None:
        self._group = group
        # As DTensor divides: all ranks but the last ones have as many columns.
        self._first = dist.get_rank(group) * -(-vocab_size // dist.get_world_size(group))

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over all targets, the same on every rank.

        Args:
            logits: ``[batch, seq, columns of this rank]``.
            targets: ``[batch, seq]``, ids of the whole vocabulary.
        """
        loss: Tensor = _CrossEntropySum.apply(logits.flatten(0, 1), targets.flatten(), self._first, self._group)
        return loss


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        scores = logits.float()
        maximum = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:1], float("-inf"))
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        scores = scores - maximum[:, None]
        mine = (targets >= first) & (targets < first + scores.shape[-1])
        column = torch.where(mine, targets - first, 0)
        picked = torch.where(mine, scores.gather(1, column[:, None]).squeeze(1), 0.0) if scores.shape[-1] else maximum * 0
        exponentials = scores.exp_()
        sums = torch.stack((exponentials.sum(-1), picked))
        dist.all_reduce(sums, group=group)
        total, picked = sums
        counted = targets != IGNORE
        ctx.save_for_backward(exponentials.div_(total[:, None]), column, mine, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, total.log() - picked, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, mine, counted = ctx.saved_tensors
        gradient = probabilities.clone()
        if gradient.shape[-1]:
            gradient.scatter_add_(1, column[:, None], -mine[:, None].to(gradient.dtype))
        gradient *= (gradients[0] * counted)[:, None]
        return gradient.to(ctx.dtype), None, None, None
