"""The collectives between the regions of tensor parallelism, on plain tensors.

Between regions, each rank has its share of the positions (sequence parallelism: Korthikanti et al., arXiv 2205.05198), or
all of them (Shoeybi et al., arXiv 1909.08053). Inside a region it has all positions and its share of the features; what it
computes from these is an addend, in forward and in backward. Backward calls the conjugate of forward's collective:

=================== ============================= =============================
where               :class:`ShardedPositions`     :class:`ReplicatedPositions`
=================== ============================= =============================
a region begins     gather, then reduce-scatter   copy, then all-reduce
addends are summed  reduce-scatter, then gather   all-reduce, then copy
ranks split a whole take own share, then gather   copy, then copy
a region sums       all-reduce, then all-reduce   the same
=================== ============================= =============================

What a region computes after its sum, from a parameter or from its input, every rank computes in full if it has all
positions. There, too, gradients are addends: :meth:`Positions.end` divides the gradient of the region's result by the number
of ranks, and :meth:`Positions.within` multiplies that of the sum again.

All tensors are ``[batch, seq, ...]``; ranks hold consecutive positions, in their order. Each collective is waited for at
once, on CUDA by the stream and not by the host: the next operation needs its result, and a compiled block loses the gradient
of an input that is still in flight (torch 2.15).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_parallel.torch_private import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_all_gather_rows,
    start_reduce_scatter,
    wait,
)

_POSITIONS: Final = 1

LARGE_ROW = 2**24
"""Bytes of a sequence (of all positions) from which a collective per sequence costs less than copying them all, which one
collective of the whole batch needs: it joins the ranks' shares in dimension 0."""


class Ranks:
    """The ranks that share the features, and this rank's place among them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """
        Args:
            mesh: of one dimension.
        """
        self.group: str = mesh.get_group().group_name
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()


class Positions(ABC):
    """How the ranks hold positions between regions."""

    differ: ClassVar[bool]
    """Whether ranks hold different positions, so that what they compute from theirs is an addend of a gradient."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @abstractmethod
    def enter(self, hidden: Tensor) -> Tensor:
        """Return all positions of ``hidden``, for a region's layers. Ranks' gradients of the result are addends."""

    @abstractmethod
    def leave(self, addend: Tensor) -> Tensor:
        """Return the sum of the ranks' ``addend``, which has all positions, as it is held between regions."""

    @abstractmethod
    def within(self, whole: Tensor) -> Tensor:
        """Return the sum ``whole``, unchanged, for a region that computes further and then calls :meth:`end`."""

    @abstractmethod
    def end(self, result: Tensor) -> Tensor:
        """Return the result of a region, unchanged. Ranks' gradients within the region are addends."""

    @abstractmethod
    def keep(self, whole: Tensor) -> Tensor:
        """Return ``whole``, which every rank has computed within a region, as it is held between regions. Without gradients
        of other ranks' positions, ranks' gradients within the region are addends, if the ranks have different positions."""

    @abstractmethod
    def split(self, whole: Tensor) -> Tensor:
        """Return ``whole``, which every rank has computed for all positions, as it is held between regions."""


class ShardedPositions(Positions):
    """Sequence parallelism: each rank has an equal share of consecutive positions."""

    differ = True

    def enter(self, hidden: Tensor) -> Tensor:
        """See :meth:`Positions.enter`."""
        gather = _Gather if type(hidden) is Tensor else _GatherOpaquely
        result: Tensor = gather.apply(hidden, self.ranks.group, self.ranks.size)
        return result

    def leave(self, addend: Tensor) -> Tensor:
        """See :meth:`Positions.leave`."""
        result: Tensor = _Scatter.apply(addend, self.ranks.group, self.ranks.size)
        return result

    def within(self, whole: Tensor) -> Tensor:
        """See :meth:`Positions.within`."""
        return whole

    def end(self, result: Tensor) -> Tensor:
        """See :meth:`Positions.end`. Gradients of a rank's own positions are addends."""
        return result

    def keep(self, whole: Tensor) -> Tensor:
        """See :meth:`Positions.keep`."""
        share = _share(whole, self.ranks.size)
        return whole.narrow(_POSITIONS, self.ranks.rank * share, share).clone()

    def split(self, whole: Tensor) -> Tensor:
        """See :meth:`Positions.split`."""
        result: Tensor = _Split.apply(whole, self.ranks.group, self.ranks.size, self.ranks.rank)
        return result


class ReplicatedPositions(Positions):
    """Without sequence parallelism: each rank has all positions and computes the same between regions."""

    differ = False

    def enter(self, hidden: Tensor) -> Tensor:
        """See :meth:`Positions.enter`."""
        copy = _Copy if type(hidden) is Tensor else _CopyOpaquely
        result: Tensor = copy.apply(hidden, self.ranks.group)
        return result

    def leave(self, addend: Tensor) -> Tensor:
        """See :meth:`Positions.leave`."""
        result: Tensor = _Sum.apply(addend, self.ranks.group)
        return result

    def within(self, whole: Tensor) -> Tensor:
        """See :meth:`Positions.within`."""
        result: Tensor = _ScaledGradient.apply(whole, float(self.ranks.size))
        return result

    def end(self, result: Tensor) -> Tensor:
        """See :meth:`Positions.end`."""
        scaled: Tensor = _ScaledGradient.apply(result, 1.0 / self.ranks.size)
        return scaled

    def keep(self, whole: Tensor) -> Tensor:
        """See :meth:`Positions.keep`."""
        return whole

    def split(self, whole: Tensor) -> Tensor:
        """See :meth:`Positions.split`."""
        return whole


def sum_over_ranks(addend: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of the ranks' ``addend``, for further code of a region. Ranks' gradients of the result are addends."""
    result: Tensor = _SumWithin.apply(addend, ranks.group)
    return result


def gather_columns(columns: Tensor, ranks: Ranks, size: int) -> Tensor:
    """Return all ``size`` columns of a tensor whose last dimension is sharded: ``[..., columns]`` to ``[..., size]``.

    Every rank must compute the same from the result. The last ranks may hold fewer columns than the others, or none.
    """
    result: Tensor = _GatherColumns.apply(columns, ranks.group, ranks.size, ranks.rank, size)
    return result


def start_gather(share: Tensor, ranks: Ranks) -> Callable[[], Tensor]:
    """Start to gather all positions of a rank's ``share``. Return a function that waits for them. Not while compiling."""
    if _by_row(share, share.nbytes * ranks.size):
        return start_all_gather_rows(share.contiguous(), ranks.size, ranks.group)
    stacked = start_all_gather(share.contiguous(), ranks.size, ranks.group)
    return lambda: torch.cat(wait(stacked).chunk(ranks.size), _POSITIONS)


def _gathered(share: Tensor, dim: int, group: str, size: int) -> Tensor:
    if dim == _POSITIONS and _by_row(share, share.nbytes * size):
        return start_all_gather_rows(share.contiguous(), size, group)()
    # The all-gather next to its matmul, in this form, is what inductor overlaps (asynchronous tensor parallelism).
    stacked = all_gather(share.contiguous(), size, group)
    return stacked if dim == 0 else torch.cat(stacked.chunk(size), dim)


def _scattered(addend: Tensor, dim: int, group: str, size: int) -> Tensor:
    _share(addend, size, dim)
    if dim == _POSITIONS and _by_row(addend, addend.nbytes):
        return torch.stack([wait(row) for row in [start_reduce_scatter(row, size, group) for row in addend.contiguous()]])
    stacked = addend.contiguous() if dim == 0 else torch.cat(addend.chunk(size, dim))
    return reduce_scatter(stacked, size, group)


def _share(whole: Tensor, size: int, dim: int = _POSITIONS) -> int:
    share, rest = divmod(whole.shape[dim], size)
    if rest:
        raise ValueError(f"{whole.shape[dim]} positions cannot be divided over {size} ranks")
    return share


def _by_row(tensor: Tensor, whole_bytes: int) -> bool:
    """Whether to call a collective for each sequence of ``tensor``. The compiler, which overlaps collectives with matmuls,
    recognises only those of the whole batch; tensors of float8 are not plain memory."""
    large = not torch.compiler.is_compiling() and whole_bytes >= len(tensor) * LARGE_ROW
    return large and not hasattr(tensor, "__tensor_flatten__")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _gathered(share, _POSITIONS, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradient, _POSITIONS, ctx.group, ctx.size), None, None


# The compiler expects gradients of the type of the output, but those of a float8 tensor are plain tensors. It does not trace
# into these two.
@torch.compiler.allow_in_graph
class _GatherOpaquely(_Gather):
    pass


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _scattered(addend, _POSITIONS, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, _POSITIONS, ctx.group, ctx.size), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: str, size: int, rank: int) -> Tensor:
        ctx.group, ctx.size = group, size
        share = _share(whole, size)
        return whole.narrow(_POSITIONS, rank * share, share).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(gradient, _POSITIONS, ctx.group, ctx.size), None, None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: str) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous(), ctx.group), None


@torch.compiler.allow_in_graph
class _CopyOpaquely(_Copy):
    pass


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor, group: str) -> Tensor:
        return all_reduce(addend.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumWithin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_reduce(addend.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous(), ctx.group), None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: Tensor, group: str, ranks: int, rank: int, size: int) -> Tensor:
        width = -(-size // ranks)
        ctx.first, ctx.columns = min(rank * width, size), columns.shape[-1]
        padded = F.pad(columns, (0, width - columns.shape[-1])) if columns.shape[-1] < width else columns
        return _gathered(padded, -1, group, ranks)[..., :size]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradient.narrow(-1, ctx.first, ctx.columns), None, None, None, None
