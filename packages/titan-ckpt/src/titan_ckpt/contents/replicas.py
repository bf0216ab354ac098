"""Requiring replicated tensors to be equal on all ranks. A checkpoint contains one rank's copy only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_ckpt.contents.plain_values import Unsaveable
from titan_ckpt.format.chunks import bytes_of
from titan_core.api import World

MAKE_EQUAL = "all-reduce it where it is updated, or exclude a buffer from checkpoints with persistent=False"


def require_equal_on_ranks(tensors: Mapping[str, Tensor], world: World) -> None:
    """Require tensors, except DTensors, to be equal on all ranks that have a tensor of the same name. Collective.

    Raises:
        Unsaveable: a tensor differs; on every rank. The message names it.
    """
    if world.size == 1:
        return
    digests = digests_of({name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)})
    text = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    if len(set(world.gather(text))) == 1:
        return  # the usual case, unless pipeline stages hold different tensors; avoids gathering all digests
    first: dict[str, tuple[int, Any]] = {}
    for rank, of_rank in enumerate(world.gather(digests)):
        for name, digest in of_rank.items():
            other, known = first.setdefault(name, (rank, digest))
            if known != digest:
                raise Unsaveable(name, f"differs between ranks {other} and {rank}")


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a digest of each tensor. Scalars are read together, because each read from a GPU synchronises."""
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
