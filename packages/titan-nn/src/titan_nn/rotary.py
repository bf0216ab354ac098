"""Rotary position embedding (Su et al., arXiv 2104.09864). Uses real numbers, because the compiler does not fuse operations
on complex ones."""

from __future__ import annotations

import torch
from torch import Tensor


def frequencies(head_dim: int, theta: float) -> Tensor:
    """Return the angle by which each pair of a head's features turns from one position to the next: fp32
    ``[head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    # The published models were trained with this fp32 expression. ``theta ** -e`` rounds differently, and at position
    # 131,071 the difference grows to an angle of 0.01.
    return 1.0 / theta**exponents


def rotary_table(frequencies: Tensor, positions: int) -> Tensor:
    """Return the cosines and sines of positions 0 to ``positions - 1``: fp32 ``[positions, 2, head_dim / 2]``."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device="cpu"), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate_neighbours(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of a head's features by the angle of its position, in fp32.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        rope: ``[seq, 2, head_dim / 2]``, or ``[batch, seq, 2, head_dim / 2]`` if positions differ by sequence.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack(_rotated(even, odd, rope), dim=-1).flatten(-2).type_as(x)


def rotate_halves(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) as :func:`rotate_neighbours` does its pairs."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat(_rotated(first, second, rope), dim=-1).type_as(x)


def _rotated(x: Tensor, y: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rope.unsqueeze(-3).unbind(-2)  # the same for all heads
    return x * cos - y * sin, x * sin + y * cos
