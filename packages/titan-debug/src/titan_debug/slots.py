"""The slot in which precisions say what they compute in another type. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api import Ref, Slot

if TYPE_CHECKING:
    import torch

FLOPS: Slot[tuple[torch.dtype, float]] = Slot(
    name="titan_debug.flops",
    summary="layer -> type of its matmuls and their FLOPs per token, forward and backward, of the whole layer",
    accepts=Ref("titan_debug.slots:type_and_flops"),
)


def type_and_flops(value: object) -> tuple[torch.dtype, float]:
    """Return ``value`` if it is a type and a number.

    Raises:
        TypeError: it is not.
    """
    import torch

    match value:
        case (torch.dtype() as dtype, float(flops)) if flops >= 0:
            return dtype, flops
    raise TypeError(f"it must be a torch.dtype and a number of FLOPs, not {value!r}")
