"""Philox4x32-10: a counter-based random generator (Salmon et al., SC'11), in plain torch operations.

A counter-based generator has no state: the n-th number is computed from n, so weights are the same on any mesh. torch's
generators do not suffice: on the CPU all shards of a DTensor get the same values, and torch's stateless
``torch.func._random`` is private and newer than the oldest torch that Titan supports.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(counters: Tensor, key: int) -> Tensor:
    """Return four random 32-bit words per counter.

    Args:
        counters: int64, any shape; the lower 64 bits of the 128-bit counter (the upper bits are zero).
        key: 64-bit key.

    Returns:
        int64 ``[*counters.shape, 4]``, each in ``[0, 2**32)``.
    """
    zero = torch.zeros_like(counters)
    return torch.stack(philox_words((counters & _MASK, (counters >> 32) & _MASK, zero, zero), key), dim=-1)


def philox_words(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the generator to a counter of four int64 tensors that contain 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        # The product of two 32-bit words fills 64 bits; int64 wraps around, and shift and mask still give both halves.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
