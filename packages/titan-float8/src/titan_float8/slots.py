"""What titan-float8 leaves for other plugins (:class:`titan_core.api.model_part.Slot`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from titan_core.api.model_part import ModelPart, Slot

FLOPS: Slot[tuple[torch.dtype, float]] = Slot("titan_debug.flops")
"""The type that a layer's products are made in, and their floating-point operations for a token, forward and backward."""
REGION_CASTS: Slot[Callable[[Tensor], Tensor]] = Slot("titan_parallel.region_casts")
"""How the layers of a region want their common input: applied to each rank's positions before they are gathered."""


def count_products(part: ModelPart, layers: Mapping[str, nn.Linear], share: float) -> None:
    """Of the three products of each of ``layers``, the share ``share`` is made in float8."""
    entries = part.entries(FLOPS)
    for name, layer in layers.items():
        entries[name] = (torch.float8_e4m3fn, 6.0 * layer.weight.numel() * share)
