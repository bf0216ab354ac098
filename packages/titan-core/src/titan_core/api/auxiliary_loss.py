"""Losses of modules inside a model (load balancing of experts, a penalty on activations), beside the objective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_core.api.microbatch import AuxiliaryLosses, current_microbatch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_auxiliary_loss(
    carrier: Tensor, name: str, loss: Tensor, *, divided: bool = False, gradient_share: float = 1.0
) -> Tensor:
    """Minimise ``loss`` beside the objective, wherever in the model and on whatever mesh it is computed.

    The loss is divided by the positions of the *global* batch, so a loss that is a sum over positions, or over sequences,
    has the same effect however ranks, microbatches and pipeline stages divide the batch. Its gradient starts when the
    backward pass reaches ``carrier``; that is also when its value is counted, so that recomputation counts nothing twice.
    Outside of a training step this does nothing.

    Args:
        carrier: a tensor that the objective depends on.
        name: what metrics call it: ``auxiliary/NAME``. A part that adds it declares the name
            (:attr:`titan_core.api.model_part.ModelPart.auxiliary_losses`).
        loss: a scalar, summed over the microbatch's positions (or sequences) that this rank has.
        divided: whether ranks that divide weights (tensor parallelism) compute it for positions of their own, as they do
            outside of regions under sequence parallelism. Otherwise all of them compute the same loss.
        gradient_share: what the gradient is multiplied by: one over the number of ranks that compute the same loss, where
            the gradients of these ranks are summed (inside of a region of tensor parallelism).

    Returns:
        ``carrier``, unchanged.
    """
    microbatch = current_microbatch()
    if microbatch is None or microbatch.auxiliary is None or not torch.is_grad_enabled():
        return carrier
    result: Tensor = _Attach.apply(carrier, loss, name, microbatch.auxiliary, divided, gradient_share)
    return result


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, loss: Tensor, name: str, losses: AuxiliaryLosses, divided: bool, share: float
    ) -> Tensor:
        ctx.value, ctx.name, ctx.losses, ctx.divided, ctx.share = loss.detach(), name, losses, divided, share
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        ctx.losses.add(ctx.name, ctx.value, ctx.divided)
        of_loss = torch.full_like(ctx.value, ctx.losses.scale * ctx.share)
        return gradients[0], of_loss, None, None, None, None
