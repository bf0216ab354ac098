"""Arithmetic over a vocabulary that may be sharded, so that an objective needs no separate implementation for shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_PIECE = 2**27
"""Bytes of fp32 numbers that exist at a time while a tensor of logits is reduced, or its gradient computed."""


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

        Temporary memory: :data:`LARGEST_PIECE` in forward and in backward, and none if compiled. Only the logits are saved.

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
        total = _sum_of_exponentials(logits, maximum)
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
        factor = normaliser_gradient - likelihood_gradient
        picked = torch.where(mine, likelihood_gradient, 0.0)
        return _gradient(logits, normaliser, factor, column, picked), None, None, None


def _sum_of_exponentials(logits: Tensor, maximum: Tensor) -> Tensor:
    """Return ``exp(logits - maximum)``, summed over columns; fp32, ``[...]``."""
    if torch.compiler.is_compiling():  # one kernel, without temporary memory
        return (logits - maximum[..., None]).exp().sum(-1)
    rows = _rows_per_piece(logits)
    pieces = zip(logits[None].flatten(0, -2).split(rows), maximum.flatten().split(rows), strict=True)
    return torch.cat([(piece - largest[:, None]).exp_().sum(-1) for piece, largest in pieces]).view(maximum.shape)


def _gradient(logits: Tensor, normaliser: Tensor, factor: Tensor, column: Tensor, picked: Tensor) -> Tensor:
    """Return ``factor * exp(logits - normaliser)``, plus ``picked`` at ``column``; in the dtype of the logits."""
    if torch.compiler.is_compiling():
        columns = torch.arange(logits.shape[-1], device=logits.device)
        scores = (logits - normaliser[..., None]).exp() * factor[..., None]
        return (scores + torch.where(columns == column, picked[..., None], 0.0)).to(logits.dtype)
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = _rows_per_piece(logits)
    tensors = (logits, gradient, normaliser[..., None], factor[..., None], column, picked[..., None])
    for piece, result, normal, scale, target, value in zip(
        *(t[None].flatten(0, -2).split(rows) for t in tensors), strict=True
    ):
        scores = torch.sub(piece, normal, out=result) if result.dtype == torch.float32 else piece - normal
        scores.exp_().mul_(scale)
        if logits.shape[-1]:
            scores.scatter_add_(-1, target, value)
        if scores is not result:
            result.copy_(scores)
        del scores  # before the next piece is allocated
    return gradient


def _rows_per_piece(logits: Tensor) -> int:
    return max(1, LARGEST_PIECE // (4 * max(1, logits.shape[-1])))


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
