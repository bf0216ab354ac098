"""The exchange of heads for positions: before attention, each rank of a group gives away its positions of all heads but its
own share, and receives the other ranks' positions of that share; afterwards back (DeepSpeed-Ulysses, arXiv 2309.14509).

Ranks hold a chunk from the front of each sequence and its mirror from the back, and those of a group are neighbours. After
the exchange, the front chunks of the group are one chunk, and the back chunks are its mirror: whole sequences, in order, if
the group divides them alone, and otherwise what a rank of a ring holds (USP: arXiv 2405.07719).

Selective recomputation keeps what the collectives return (:data:`~titan_parallel.torch_private.SAVED_OPERATORS`), and does
not communicate again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_core.api import Mixer
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


_HEADS, _POSITIONS = 1, 2
"""Dimensions of the tensors of causal attention."""

# These return functions, not methods of an object for each module: the compiler compares functions by their code, so that
# one graph serves all blocks.


def attention_by_heads(exchange: HeadExchange, attend_to_heads: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return causal attention of all heads from a rank's positions, which calls ``attend_to_heads`` with its share of the
    heads and the positions of all ranks of ``exchange``."""

    def forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, sinks: Tensor | None = None) -> Tensor:
        q, k, v = exchange.to_heads((q, k, v), _HEADS, _POSITIONS)
        options = {} if sinks is None else {"sinks": exchange.own(sinks)}
        return exchange.to_positions(attend_to_heads(q, k, v, documents, **options), _HEADS, _POSITIONS)

    return forward


def mixer_by_heads(
    exchange: HeadExchange, compute: Callable[..., Tensor], mixer: Mixer, divisor: int
) -> Callable[..., Tensor]:
    """Return the computation of a mixer of another kind, which calls ``compute`` with this rank's share of the heads.

    Args:
        mixer: has ``heads`` and ``heads_dim``.
        divisor: tensor-parallel degree, which may have divided the heads.
    """
    dim, positions_dim = mixer.heads_dim, mixer.sequence_dim
    assert dim is not None and mixer.heads is not None and mixer.key_heads is not None
    of_any_rank = {mixer.heads, mixer.key_heads}
    sizes = of_any_rank | {number // divisor for number in of_any_rank}

    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        given = [*arguments, *keywords.values()]
        positions = given[0].shape[positions_dim]
        exchanged = [one for one in given if isinstance(one, Tensor) and _has_heads(one, positions)]
        received = iter(exchange.to_heads(exchanged, dim, positions_dim))
        own = [next(received) if isinstance(one, Tensor) and _has_heads(one, positions) else _of_heads(one) for one in given]
        count = len(arguments)
        result = compute(*own[:count], **dict(zip(keywords, own[count:], strict=True)))
        return exchange.to_positions(result, dim, positions_dim)

    def _has_heads(tensor: Tensor, positions: int) -> bool:
        shape = tensor.shape
        return len(shape) > max(dim, positions_dim) and shape[positions_dim] == positions and shape[dim] in sizes

    def _of_heads(argument: Any) -> Any:
        """Return this rank's share of an argument with a number for each head, or an argument that all heads share."""
        if not isinstance(argument, Tensor) or not argument.dim() or not argument.is_floating_point():
            return argument
        if argument.dim() == 1 and argument.shape[0] in sizes:
            return exchange.own(argument)
        why = f"a tensor {list(argument.shape)} has no heads in dimension {dim}, so ranks cannot divide the heads"
        raise ValueError(f"a mixer of kind {mixer.kind!r} is called with other tensors than its layout says: {why}")

    return forward
