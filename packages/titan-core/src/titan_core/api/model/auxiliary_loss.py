"""Losses that modules of the model add to the objective, such as expert load balancing or an activation penalty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_core.api.parallel.microbatch import AuxiliaryLosses, current_microbatch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_auxiliary_loss(
    carrier: Tensor, name: str, loss: Tensor, *, divided: bool = False, gradient_share: float = 1.0
) -> Tensor:
    """Minimise ``loss`` in addition to the objective. It may be computed anywhere in the model and on any mesh.

    The loss is divided by the number of positions in the *global* batch, so a loss that is a sum over positions or sequences
    has the same effect however ranks, microbatches and pipeline stages divide the batch. Its gradient enters the backward
    pass at ``carrier``. Its value is counted at the same point, so that recomputation does not count it twice. Outside a
    training step the function does nothing.

    Args:
        carrier: a tensor that the objective depends on.
        name: the metric is called ``auxiliary/NAME``. A part that adds the loss must declare the name
            (:attr:`titan_core.api.ModelPart.auxiliary_losses`).
        loss: a scalar, summed over this rank's positions (or sequences) of the microbatch.
        divided: whether tensor-parallel ranks compute it for different positions, as they do outside regions under sequence
            parallelism. Otherwise all of them must compute the same loss.
        gradient_share: factor on the gradient. Inside a tensor-parallel region, where the gradients of the ranks are summed,
            it must be one over the number of ranks that compute the same loss.

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
        loss_gradient = torch.full_like(ctx.value, ctx.losses.scale * ctx.share)
        return gradients[0], loss_gradient, None, None, None, None
