"""Slots that titan-float8 fills for other plugins (:class:`titan_core.api.Slot`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import ModelPart, Slot

FLOPS: Slot[tuple[torch.dtype, float]] = Slot("titan_debug.flops")
"""Layer name -> dtype of its low-precision matmuls, and their floating-point operations per token, forward and backward."""
REGION_CASTS: Slot[Callable[[Tensor], Tensor]] = Slot("titan_parallel.region_casts")
"""Region name -> cast of the input that its layers share, applied to each rank's positions before the all-gather."""

COMPILER_OPTIONS: Slot[Mapping[str, Any]] = Slot("titan_parallel.compiler_options")
"""Module name -> options of inductor for the block that contains the module."""


def round_as_eager(part: ModelPart, layers: Iterable[str]) -> None:
    """Make compiled code round intermediate results to bf16 wherever eager code does.

    Fused code would keep them in fp32. With one scale per row, training then ends in NaN
    (https://github.com/pytorch/pytorch/issues/150859).
    """
    part.entries(COMPILER_OPTIONS).update({name: {"emulate_precision_casts": True} for name in layers})


def record_flops(part: ModelPart, layers: Mapping[str, nn.Linear], share: float) -> None:
    """Record that each of ``layers`` computes the fraction ``share`` of its three matmuls in float8."""
    entries = part.entries(FLOPS)
    for name, layer in layers.items():
        entries[name] = (torch.float8_e4m3fn, 6.0 * layer.weight.numel() * share)
