"""All-to-all of rows with a gradient, during which the rank computes something else.

Its start and its end are two nodes of the autograd graph. Of the nodes that are ready, the backward pass takes the one that
the forward pass created last: what was computed between the start and the end of an exchange is differentiated between the
start and the end of the exchange of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_experts.torch_private import start_all_to_all, wait


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
