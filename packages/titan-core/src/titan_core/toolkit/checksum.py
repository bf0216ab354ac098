"""A checksum of a tensor's bits, computed on its device."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 2**22
"""Elements whose bits are summed at once: sums of integers are computed from copies of 64 bits."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of ``tensor``, read as whole numbers: a 0-d tensor on its device."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(_BITS[real.element_size()]).flatten()
    return torch.stack([piece.sum(dtype=torch.int64) for piece in bits.split(_AT_ONCE)]).sum()
