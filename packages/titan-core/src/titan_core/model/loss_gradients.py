"""Gradients that are computed in the forward pass, along with a loss that is a sum over chunks of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.api import Microbatch


@dataclass(eq=False)
class Gradients:
    """A loss, and its gradients multiplied by ``scale``."""

    loss: Tensor
    scale: Tensor
    of: dict[str, list[Tensor | None]]
    """Gradients of the ``"hidden"`` states and of the ``"parameters"``, until the backward pass takes them. ``None`` for a
    tensor that the loss does not depend on."""


def gradients_of(
    loss_of_chunk: Callable[[Tensor, Microbatch], Tensor],
    calls: Sequence[tuple[Tensor, Microbatch]],
    parameters: Sequence[Tensor],
    divisor: float | Tensor,
) -> Gradients | None:
    """Return the sum of the losses of ``calls``, with its gradients.

    Args:
        loss_of_chunk: returns the loss of a chunk of hidden states, ``[batch, positions, dim]``.
        parameters: leaves of the autograd graph that the loss may depend on.
        divisor: the caller will divide the loss by it. Gradients are scaled before they are rounded to their dtype, and
            auxiliary losses within the chunk add gradients that are not to be scaled.

    Returns:
        ``None`` if the loss depends on other tensors that need gradients.
    """
    sums = [_Sum(parameter) for parameter in parameters]
    losses: list[Tensor] = []
    hidden_gradients: list[Tensor | None] = []
    with _own_dtype(parameters):
        for hidden, microbatch in calls:
            leaf = hidden.detach().requires_grad_()
            loss = loss_of_chunk(leaf, microbatch)
            if not losses and not _depends_only_on(loss, [leaf, *parameters]):
                return None
            scale = torch.ones_like(loss.detach()) / divisor  # computed as the backward pass of the division does
            losses.append(loss.detach())
            hidden_gradients.append(_add_gradients(loss, scale, leaf, sums))
    of = {"hidden": [_joined(hidden_gradients)], "parameters": [total.value for total in sums]}
    return Gradients(torch.stack(losses).sum(), scale, of)


def _add_gradients(loss: Tensor, scale: Tensor, hidden: Tensor, sums: Sequence[_Sum]) -> Tensor | None:
    """Add the gradients of a chunk to ``sums``, and return that of its hidden states. Keeps no gradient after that."""
    if not loss.requires_grad:
        return None
    inputs = [hidden, *(total.parameter for total in sums)]
    found, *others = torch.autograd.grad(loss, inputs, scale, allow_unused=True)
    for total, gradient in zip(sums, others, strict=True):
        if gradient is not None:
            total.add(gradient)
    return found


class _Sum:
    """The sum of a parameter's gradients, in the dtype in which the parameter accumulates them: fp32 if FSDP reduces them in
    fp32 (torch >= 2.15), else the parameter's."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.value: Tensor | None = None
        self._dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)

    def add(self, gradient: Tensor) -> None:
        if self.value is None:  # a copy: autograd may return one tensor for several inputs, or a view
            dtype = self._dtype or gradient.dtype
            self.value = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
        else:
            self.value.add_(gradient)


@contextmanager
def _own_dtype(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Make autograd return gradients in the dtype in which they are computed, without a copy in another."""
    dtypes = [(parameter, getattr(parameter, "grad_dtype", None)) for parameter in parameters]
    changed = [(parameter, dtype) for parameter, dtype in dtypes if dtype not in (None, parameter.dtype)]
    for parameter, _ in changed:
        parameter.grad_dtype = None
    try:
        yield
    finally:
        for parameter, dtype in changed:
            parameter.grad_dtype = dtype


def attach_gradients(gradients: Gradients, hidden: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the loss, whose backward pass gives ``hidden`` and ``parameters`` their gradients.

    They are two nodes of the graph: schedules that compute the gradients of inputs and of weights separately run each once.
    """
    loss: Tensor = _Attached.apply(gradients.loss, gradients, "hidden", hidden)
    if parameters:
        loss = loss + _Attached.apply(torch.zeros_like(gradients.loss), gradients, "parameters", *parameters)
    return loss


class _Attached(torch.autograd.Function):
    """Returns ``value``; in backward, hands over the named gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Gradients, name: str, *inputs: Tensor) -> Tensor:
        ctx.gradients, ctx.name = gradients, name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients: Gradients = ctx.gradients
        found = gradients.of.pop(ctx.name, None)  # not kept, so that the engine need not copy them
        if found is None:
            raise RuntimeError("the gradients of the loss are not kept for a second backward pass")
        factor = outer[0] / gradients.scale  # exactly 1 unless the caller divides by something else
        for gradient in found:
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(factor)
        return None, None, None, *found


def _depends_only_on(loss: Tensor, allowed: Sequence[Tensor]) -> bool:
    """Return whether all leaves of the graph of ``loss`` are ``allowed``."""
    names = {id(tensor) for tensor in allowed}
    seen: set[Any] = {None}
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in names:
                return False
            stack += [following for following, _ in node.next_functions]
    return True


def _joined(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the gradients of successive positions, ``[batch, positions, dim]``, as one."""
    found = [gradient for gradient in gradients if gradient is not None]
    return torch.cat(found, dim=1) if found else None
