"""Slots that titan-float8 fills for other plugins (:class:`titan_core.api.model_part.Slot`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from titan_core.api.model_part import ModelPart, Slot

FLOPS: Slot[tuple[torch.dtype, float]] = Slot("titan_debug.flops")
"""Layer name -> dtype of its low-precision matmuls, and their floating-point operations per token, forward and backward."""
REGION_CASTS: Slot[Callable[[Tensor], Tensor]] = Slot("titan_parallel.region_casts")
"""Region name -> cast of the input that its layers share, applied to each rank's positions before the all-gather."""


def record_flops(part: ModelPart, layers: Mapping[str, nn.Linear], share: float) -> None:
    """Record that each of ``layers`` computes the fraction ``share`` of its three matmuls in float8."""
    entries = part.entries(FLOPS)
    for name, layer in layers.items():
        entries[name] = (torch.float8_e4m3fn, 6.0 * layer.weight.numel() * share)
