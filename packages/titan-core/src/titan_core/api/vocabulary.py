"""Arithmetic over a vocabulary that may be sharded, so that an objective needs no separate implementation for shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Vocabulary:
    """The columns of the logits that this rank holds.

    Each rank of ``group`` holds consecutive columns and computes the same result (Shoeybi et al., arXiv 1909.08053,
    section 3). Logits are never gathered.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, first: int = 0) -> None:
        """
        Args:
            group: the ranks over which the columns are sharded; ``None``: this rank holds all of them.
            first: token id of this rank's first column.
        """
        self.group = group
        self.first = first

    def log_likelihood(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log probabilities of ``ids``, and the log of the normaliser, ``log(sum(exp(logits)))``.

        Temporary memory: one fp32 tensor of the size of the logits, in forward and in backward. No such tensor is saved.

        Args:
            logits: this rank's columns, ``[..., columns]``, in any floating-point type; computation is in fp32.
            ids: token ids of the whole vocabulary, ``[...]``. Results for negative ids are meaningless.

        Returns:
            Two fp32 tensors, ``[...]``, the same on every rank of the group.
        """
        result: tuple[Tensor, Tensor] = _LogLikelihood.apply(logits, ids, self.first, self.group)
        return result

    def gather(self, logits: Tensor, size: int) -> Tensor:
        """Return the logits of all columns, on every rank. Has no gradient.

        Args:
            logits: the columns on this rank, ``[..., columns]``.
            size: number of columns on all ranks together.
        """
        if self.group is None:
            return logits
        ranks = dist.get_world_size(self.group)
        width = -(-size // ranks)  # the last ranks may have fewer columns, or none
        padded = torch.nn.functional.pad(logits, (0, width - logits.shape[-1]))
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)[..., :size]

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all columns: ``[..., columns]`` to ``[...]``, the same on every rank of the group."""
        result = values.sum(-1)
        return result if self.group is None else _SumOverRanks.apply(result, self.group)


class _LogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, first: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        columns = logits.shape[-1]
        mine = (ids >= first) & (ids < first + columns)
        column = torch.where(mine, ids - first, 0)[..., None]
        if columns:
            maximum = logits.amax(-1).float()
            picked = torch.where(mine, logits.gather(-1, column).squeeze(-1).float(), 0.0)
        else:  # more ranks than columns
            maximum = logits.new_full(ids.shape, float("-inf"), dtype=torch.float32)
            picked = maximum.new_zeros(ids.shape)
        if group is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        total = (logits - maximum[..., None]).exp_().sum(-1)
        if group is not None:
            sums = torch.stack((total, picked))
            dist.all_reduce(sums, group=group)
            total, picked = sums
        normaliser = total.log() + maximum
        ctx.save_for_backward(logits, mine, column, normaliser)
        return picked - normaliser, normaliser

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, mine, column, normaliser = ctx.saved_tensors
        likelihood_gradient, normaliser_gradient = gradients
        gradient = (logits - normaliser[..., None]).exp_()
        gradient.mul_((normaliser_gradient - likelihood_gradient)[..., None])
        if logits.shape[-1]:
            gradient.scatter_add_(-1, column, torch.where(mine, likelihood_gradient, 0.0)[..., None])
        return gradient.to(logits.dtype), None, None, None


class _SumOverRanks(torch.autograd.Function):
    """All ranks compute the same loss from the sum, so each rank's gradient is already that of its own columns."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
