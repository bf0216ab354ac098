"""A checksum of a tensor's bits and of their places, computed on its device."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 2**20
"""Elements whose bits are summed at once: each takes 24 bytes meanwhile."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of ``tensor``, read as whole numbers, each times an odd number of its own: a 0-d tensor on
    its device. Elements that changed places, or changed by opposite amounts, change it too."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(_BITS[real.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), _AT_ONCE):
        piece = bits[begin : begin + _AT_ONCE].long()  # the tensor itself, if it has 64 bits
        factors = torch.arange(2 * begin + 1, 2 * (begin + len(piece)), 2, device=bits.device)
        total += (piece * factors).sum()
    return total
