"""Llama 3.1's scaling of rotary frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titan_core.toolkit.rotary import frequencies, rotary_table
from titan_models_llama.config import LlamaArgs, RopeScaling


def rope_table(args: LlamaArgs) -> Tensor:
    """Return the cosines and sines of all positions: fp32 ``[max_seq_len, 2, head_dim / 2]``."""
    angles = frequencies(args.head_dim, args.rope_theta)
    if args.rope_scaling is not None:
        angles = scale_frequencies(angles, args.rope_scaling)
    return rotary_table(angles, args.max_seq_len)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return ``frequencies``, with those divided whose wavelengths do not fit into the original context.

    The operations have the order of Llama 3.1's published code, so that they round alike
    (:func:`titan_core.toolkit.rotary.frequencies`).
    """
    original, low, high = scaling.original_max_seq_len, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    kept = (original / wavelengths - low) / (high - low)
    blended = (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)
