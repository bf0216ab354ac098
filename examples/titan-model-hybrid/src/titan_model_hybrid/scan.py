"""A linear recurrence, computed for all positions in a logarithmic number of steps."""

import torch
from torch import Tensor


def scan(decay: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """``h[t] = decay[t] * h[t - 1] + inputs[t]`` along dimension 1, from ``h[-1] = 0``.

    Args:
        decay: ``[batch, seq, features]``.
        inputs: the like.

    Returns:
        ``h``, and the product of ``decay[0]`` to ``decay[t]``: what is left at ``t`` of a first state other than 0.
    """
    span = 1
    while span < inputs.shape[1]:
        # Each position holds the recurrence over the `span` positions that end there; those before it hold the next ones.
        inputs = torch.cat((inputs[:, :span], inputs[:, span:] + decay[:, span:] * inputs[:, :-span]), dim=1)
        decay = torch.cat((decay[:, :span], decay[:, span:] * decay[:, :-span]), dim=1)
        span *= 2
    return inputs, decay


def begins(documents: Tensor) -> Tensor:
    """Whether a document begins at a position, ``[batch, seq]``."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat((first, documents[:, 1:] != documents[:, :-1]), dim=1)
