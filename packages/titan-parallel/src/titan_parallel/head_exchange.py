"""The exchange of heads for positions: before attention, each rank of a group gives away its positions of all heads but its
own share, and receives the other ranks' positions of that share; afterwards back (DeepSpeed-Ulysses, arXiv 2309.14509).

Ranks hold a chunk from the front of each sequence and its mirror from the back, and those of a group are neighbours. After
the exchange, the front chunks of the group are one chunk, and the back chunks are its mirror: whole sequences, in order, if
the group divides them alone, and otherwise what a rank of a ring holds (USP: arXiv 2405.07719).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_parallel.region_collectives import Ranks
from titan_parallel.torch_private import all_to_all


class HeadExchange:
    """Trades heads for positions among ``ranks``."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def to_heads(self, tensors: Sequence[Tensor], heads: int, positions: int) -> list[Tensor]:
        """Return this rank's share of the heads of each tensor, with the positions of all ranks in order. Tensors of one
        type are exchanged in one collective.

        A tensor may have fewer heads than others, as keys and values do: each of its heads belongs to equally many
        successive heads of the others. A head that several ranks need is sent to each of them; its gradient is their sum.

        Args:
            tensors: each with all heads and this rank's positions.
            heads: dimension of the heads.
            positions: dimension of the positions, the rank's front chunk followed by its back chunk.
        """
        size = self.ranks.size
        sent = [_divisible(tensor, heads, size).unflatten(heads, (size, -1)).movedim(heads, 0) for tensor in tensors]
        return [self._joined(tensor, positions) for tensor in self._exchange(sent)]

    def to_positions(self, result: Tensor, heads: int, positions: int) -> Tensor:
        """Return all heads, with this rank's positions, of the ``result`` of what :meth:`to_heads` has returned."""
        (received,) = self._exchange([self._split(result, positions)])
        return received.movedim(0, heads).flatten(heads, heads + 1)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's share of ``whole``, which has a number, or a slice, for each head in dimension 0."""
        return _divisible(whole, 0, self.ranks.size).chunk(self.ranks.size)[self.ranks.rank]

    def _joined(self, pieces: Tensor, positions: int) -> Tensor:
        """Join the positions of the ranks' ``pieces``, ``[ranks, ...]``: the back chunks follow in opposite order."""
        front, back = pieces.chunk(2, dim=positions + 1)
        chunks = (front, back.flip(0))
        return torch.cat([chunk.movedim(0, positions).flatten(positions, positions + 1) for chunk in chunks], positions)

    def _split(self, whole: Tensor, positions: int) -> Tensor:
        """Reverse :meth:`_joined`."""
        front, back = (
            chunk.unflatten(positions, (self.ranks.size, -1)).movedim(positions, 0) for chunk in whole.chunk(2, positions)
        )
        return torch.cat((front, back.flip(0)), positions + 1)

    def _exchange(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Send row ``i`` of each tensor to rank ``i``, and return the rows that arrive."""
        if any(tensor.dtype != sent[0].dtype for tensor in sent):
            return [self._exchange([tensor])[0] for tensor in sent]
        rows = [tensor.flatten(1) for tensor in sent]
        joined = torch.cat(rows, 1) if len(rows) > 1 else rows[0].contiguous()
        pieces = _Exchange.apply(joined, self.ranks.group).split([row.shape[1] for row in rows], 1)
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, sent, strict=True)]


def _divisible(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Repeat each head as often as is needed for ``size`` ranks to have equally many."""
    heads = tensor.shape[dim]
    times = math.lcm(heads, size) // heads
    return tensor if times == 1 else tensor.repeat_interleave(times, dim)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_to_all(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradient.contiguous(), ctx.group), None
