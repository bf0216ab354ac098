"""Converting the weights that a run saves after its last step (``checkpoint.last_save_model_only``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from titan_ckpt.contents.tensors import local
from titan_ckpt.format.dtypes import overflows
from titan_core.api import World

log = logging.getLogger(__name__)


def in_export_dtype(tensors: Mapping[str, Tensor], dtype: str, world: World) -> dict[str, Tensor]:
    """Return ``tensors`` in ``checkpoint.export_dtype``, or unchanged if a value would overflow. To be called on all ranks.

    Args:
        dtype: name of the dtype.
    """
    wanted: torch.dtype = getattr(torch, dtype)
    exported = {name: tensor.to(wanted) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    overflowing = [
        name
        for name, tensor in exported.items()
        if tensor.is_floating_point() and overflows(local(tensors[name]), local(tensor))
    ]
    on_all_ranks = sorted({name for names in world.gather(overflowing) for name in names})
    if not on_all_ranks:
        return exported
    log.error(
        "%s has values too large for checkpoint.export_dtype = %r: the weights are saved in their own dtype",
        on_all_ranks[0],
        dtype,
    )
    return dict(tensors)
