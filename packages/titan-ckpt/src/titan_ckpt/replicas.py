"""Tensors of which each rank has one, and a checkpoint keeps one: they must be the same on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_ckpt.chunks import bytes_of
from titan_ckpt.plain_values import Unsaveable
from titan_core.api.world import World

ONE_IS_KEPT = (
    "a checkpoint keeps one rank's: reduce it over the ranks where it is updated, or keep a buffer out of checkpoints with "
    "persistent=False"
)


def require_alike(tensors: Mapping[str, Tensor], world: World) -> None:
    """Hold the tensors that are no DTensors against those of the same name on other ranks. To be called by all ranks.

    Raises:
        Unsaveable: naming one that differs; on every rank.
    """
    if world.size == 1:
        return
    digests = digests_of({name: one for name, one in tensors.items() if not isinstance(one, DTensor)})
    text = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    if len(set(world.gather(text))) == 1:
        return  # as it is unless a pipeline gives ranks other tensors: nothing long is sent
    first: dict[str, tuple[int, Any]] = {}
    for rank, of_rank in enumerate(world.gather(digests)):
        for name, digest in of_rank.items():
            other, known = first.setdefault(name, (rank, digest))
            if known != digest:
                raise Unsaveable(name, f"is not the same on ranks {other} and {rank}")


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What shows whether tensors are the same on another rank. Scalars are read together, since each read of a GPU waits."""
    values: dict[str, Any] = {}
    scalars: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            scalars.setdefault((tensor.device, tensor.dtype), []).append(name)
        else:
            values[name] = hashlib.sha256(bytes_of(tensor)).hexdigest()
    for names in scalars.values():
        together = torch.stack([tensors[name] for name in names]).tolist()
        values |= {name: repr(value) for name, value in zip(names, together, strict=True)}
    return values
