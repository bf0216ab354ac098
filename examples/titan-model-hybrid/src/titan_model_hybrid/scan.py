"""A linear recurrence, computed for all positions in a logarithmic number of steps."""

import torch
from torch import Tensor


def scan(decay: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``h[t] = decay[t] * h[t - 1] + inputs[t]`` along dimension 1, with ``h[-1] = 0``.

    Args:
        decay: ``[batch, seq, features]``.
        inputs: ``[batch, seq, features]``.

    Returns:
        ``h``, and for each ``t`` the product of ``decay[0]`` to ``decay[t]``: the share of a nonzero initial state that is
        left at ``t``.
    """
    span = 1
    while span < inputs.shape[1]:
        # Each position holds the recurrence over the `span` positions that end there. Combining it with the position `span`
        # earlier doubles that.
        inputs = torch.cat((inputs[:, :span], inputs[:, span:] + decay[:, span:] * inputs[:, :-span]), dim=1)
        decay = torch.cat((decay[:, :span], decay[:, span:] * decay[:, :-span]), dim=1)
        span *= 2
    return inputs, decay


def begins(documents: Tensor) -> Tensor:
    """Whether a document begins at each position, ``[batch, seq]``."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat((first, documents[:, 1:] != documents[:, :-1]), dim=1)
