"""Sends rows to the ranks of their experts, and the outputs back. No rank drops a row.

Rows come sorted by expert, ``[rows, dim]``, with their number for each expert, int64 ``[experts]``. Rows after the last
counted one belong to no expert. Each rank of the view holds an equal number of successive experts.

A rank computes something else during an exchange. The start and the end of an exchange are two nodes of the autograd
graph. Of the nodes that are ready, the backward pass takes the one that the forward pass created last: what was computed
between the start and the end of an exchange is differentiated between the start and the end of that of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_experts.torch_private import start_all_to_all, wait
from titan_nn.experts import inverse, move_rows

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows sorted by this rank's experts, number of rows of each) -> outputs of the same shape."""
Beside = Callable[[], object]
"""What the rank computes once while the rows are on their way to their experts."""
Dispatch = Callable[[Tensor, Tensor, Compute, Beside | None], Tensor]
"""(rows, number of rows of each expert, what this rank's experts compute, what it computes meanwhile) -> outputs of the same
shape as the rows."""


class AllToAll:
    """Sends the routed tokens only. One device sync reads their counts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, rows: Tensor, counts: Tensor, compute: Compute, beside: Beside | None = None) -> Tensor:
        """Return what the experts of all ranks compute; see :data:`Dispatch`."""
        ranks = self._mesh.size()
        # [ranks, experts per rank]: the rows that this rank sends to each rank, and those that each rank sends to this one.
        leaving = counts.view(ranks, -1)
        arriving = exchange_counts(counts, self._mesh).view(ranks, -1)
        sent, received = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
        arrived = exchange_rows(rows[: sum(sent)], received, sent, self._mesh, beside)
        # Rows arrive sorted by rank, then by expert. The experts need them sorted by expert.
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
        order = experts.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        back = inverse(order)
        outputs = move_rows(compute(move_rows(arrived, order, back), arriving.sum(0)), back, order)
        returned = exchange_rows(outputs, sent, received, self._mesh)
        return torch.nn.functional.pad(returned, (0, 0, 0, rows.shape[0] - returned.shape[0]))


class Padded:
    """Sends the same number of rows between any two ranks, filled up where there are fewer. The host does not wait."""

    def __init__(self, mesh: DeviceMesh, most: Callable[[int], int]) -> None:
        """
        Args:
            most: number of rows of this rank -> how many of them it can send to one rank.
        """
        self._mesh, self._most = mesh, most

    def __call__(self, rows: Tensor, counts: Tensor, compute: Compute, beside: Beside | None = None) -> Tensor:
        """Return what the experts of all ranks compute; see :data:`Dispatch`. If this rank has more rows for a rank than it
        can send, all outputs are NaN."""
        ranks, limit = self._mesh.size(), self._most(rows.shape[0])
        ends = counts.view(ranks, -1).cumsum(1)
        sent, leaving = ends[:, -1], ends.clamp(max=limit).diff(dim=1, prepend=ends.new_zeros(ranks, 1))
        slots = torch.arange(limit, device=rows.device)
        starts = sent.cumsum(0) - sent
        # Slot -> row, and row -> slot; -1: none.
        row_of = torch.where(slots < sent[:, None], starts[:, None] + slots, -1).flatten()
        slot_of = inverse(row_of, rows.shape[0])
        equal = [limit] * ranks
        padded = exchange_rows(move_rows(rows, row_of, slot_of, partial=True), equal, equal, self._mesh, beside)
        arriving = exchange_counts(leaving.flatten(), self._mesh).view(ranks, -1)
        # Experts come first in their order, then the slots that hold nothing.
        expert_of = torch.searchsorted(arriving.cumsum(1), slots.expand(ranks, -1).contiguous(), right=True)
        order = expert_of.flatten().argsort(stable=True)
        back = inverse(order)
        outputs = move_rows(compute(move_rows(padded, order, back), arriving.sum(0)), back, order)
        returned = exchange_rows(outputs, equal, equal, self._mesh)
        overflows = (sent > limit).any()
        return move_rows(returned, slot_of, row_of, partial=True).masked_fill(overflows, torch.nan)


def exchange_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Send an equal piece of ``counts`` to each rank of ``mesh``, and return the received pieces in rank order."""
    equal = [len(counts) // mesh.size()] * mesh.size()
    return wait(start_all_to_all(counts.contiguous(), equal, equal, mesh.get_group().group_name))


def exchange_rows(
    rows: Tensor,
    received: list[int],
    sent: list[int],
    mesh: DeviceMesh,
    beside: Callable[[], object] | None = None,
) -> Tensor:
    """Send ``sent[rank]`` rows to each rank of ``mesh``, and return the received rows in rank order. Differentiable.

    Args:
        received: number of rows from each rank.
        beside: is called while the rows are on their way.
    """
    group = mesh.get_group().group_name
    arriving, ticket = _Start.apply(rows, received, sent, group)
    if beside is not None:
        beside()
    arrived: Tensor = _End.apply(ticket, arriving, received, sent, group)
    return arrived


class _Start(torch.autograd.Function):
    """Also returns a ticket, which holds no memory: the gradients of the rows have another shape than what arrives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> tuple[Tensor, Tensor]:
        arriving = start_all_to_all(rows.contiguous(), received, sent, group)
        ctx.mark_non_differentiable(arriving)
        ctx.set_materialize_grads(False)
        return arriving, rows.new_empty(()).expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, _: None, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return wait(gradient), None, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, arriving: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return wait(arriving)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return start_all_to_all(gradient.contiguous(), ctx.sent, ctx.received, ctx.group), None, None, None, None
