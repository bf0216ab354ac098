"""A run's tensors by name, as a checkpoint calls them, on any mesh: ``model.<parameter>``, ``observers.<name>`` and, of the
optimizer (:mod:`titan_ckpt.optimizer_state`), ``optimizer.<parameter>.<key>``. Where copies of the weights train apart, the
names of all copies but the first begin with ``replica-N.``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_ckpt.dtypes import ITEM_BYTES, dtype_name
from titan_ckpt.plain_values import Unsaveable
from titan_ckpt.stored import MODEL, OBSERVERS, of_replica
from titan_core.api.checkpoint import CheckpointEvents
from titan_core.api.model_part import ModelPart
from titan_core.api.world import World


def model_tensors(parts: Sequence[ModelPart]) -> dict[str, Tensor]:
    """Parameters, and the buffers that are part of a model's state; a shared parameter once, under its first name."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        kept = part.module.state_dict().keys()
        for name, tensor in (*part.module.named_parameters(), *part.module.named_buffers()):
            if name in kept:
                tensors[f"{MODEL}.{name}"] = tensor.detach()
    return tensors


def buffer_names(parts: Sequence[ModelPart]) -> Iterator[str]:
    """What :func:`model_tensors` calls buffers."""
    return (f"{MODEL}.{name}" for part in parts for name, _ in part.module.named_buffers())


def observers_tensors(lifecycle: CheckpointEvents) -> dict[str, Tensor]:
    """What observers keep.

    Raises:
        Unsaveable: a checkpoint cannot keep one.
    """
    tensors = {f"{OBSERVERS}.{name}": tensor.detach() for name, tensor in lifecycle.state_tensors().items()}
    for name, tensor in tensors.items():
        require_saveable(tensor, name)
    return tensors


def by_copy(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """``tensors`` by the names of this rank's copy of the weights."""
    return {replica_prefix(world) + name: tensor for name, tensor in tensors.items()}


def replica_prefix(world: World) -> str:
    """What the names of this rank's tensors begin with."""
    return of_replica(world.replica)


def require_saveable(tensor: Tensor, name: str) -> None:
    """Raise for what cannot be written as a dense tensor's bytes.

    Raises:
        Unsaveable: ``tensor``, which is called ``name``, is of that kind.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise Unsaveable(name, "is a DTensor of partial sums, which no rank holds the value of")
    here = local(tensor)
    if type(here) not in (Tensor, nn.Parameter):
        raise Unsaveable(name, f"is a {type(here).__qualname__}, of which only its own class knows what it holds")
    if here.layout is not torch.strided or dtype_name(here.dtype) not in ITEM_BYTES:
        raise Unsaveable(name, f"is a tensor of {here.dtype} and {here.layout}")


def local(tensor: Tensor) -> Tensor:
    """What this rank has of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
