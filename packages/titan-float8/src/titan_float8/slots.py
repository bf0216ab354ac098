"""What titan-float8 leaves in the slots of other plugins (:meth:`titan_core.api.ModelPart.fill`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from titan_core.api import ModelPart


def round_as_eager(part: ModelPart, layers: Iterable[str]) -> None:
    """Make compiled code round intermediate results to bf16 wherever eager code does.

    Fused code would keep them in fp32. With one scale per row, training then ends in NaN
    (https://github.com/pytorch/pytorch/issues/150859).
    """
    for name in layers:
        part.fill("titan_parallel.compiler_options", name, {"emulate_precision_casts": True})


def record_flops(part: ModelPart, layers: Mapping[str, nn.Linear], share: float) -> None:
    """Record that each of ``layers`` computes the fraction ``share`` of its three matmuls in float8."""
    for name, layer in layers.items():
        part.fill("titan_debug.flops", name, (torch.float8_e4m3fn, 6.0 * layer.weight.numel() * share))
