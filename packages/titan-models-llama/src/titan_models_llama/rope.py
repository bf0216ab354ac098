"""Rotary position embedding (Su et al., arXiv 2104.09864) with Llama 3.1's frequency scaling. Uses real numbers, because the
compiler does not fuse operations on complex ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titan_models_llama.config import LlamaArgs, RopeScaling


def rope_table(args: LlamaArgs) -> Tensor:
    """Return the cosines and sines of all positions: fp32 ``[max_seq_len, 2, head_dim / 2]``."""
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.float32, device="cpu") / args.head_dim
    # The published models were trained with this fp32 expression. ``theta ** -e`` rounds differently, and at position
    # 131,071 the difference grows to an angle of 0.01.
    frequencies = 1.0 / args.rope_theta**exponents
    if args.rope_scaling is not None:
        frequencies = scale_frequencies(frequencies, args.rope_scaling)
    angles = torch.outer(torch.arange(args.max_seq_len, dtype=torch.float32, device="cpu"), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return ``frequencies``, with those divided whose wavelengths do not fit into the original context.

    The operations have the order of Llama 3.1's published code, so that they round alike (see :func:`rope_table`).
    """
    original, low, high = scaling.original_max_seq_len, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    kept = (original / wavelengths - low) / (high - low)
    blended = (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of a head's features by the angle of its position, in fp32.

    Args:
        x: ``[batch, heads, seq, head_dim]``.
        rope: ``[seq, 2, head_dim / 2]``, or ``[batch, seq, 2, head_dim / 2]`` if positions differ by sequence.
    """
    cos, sin = rope.unbind(-2)
    if rope.dim() == 4:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for all heads
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)
