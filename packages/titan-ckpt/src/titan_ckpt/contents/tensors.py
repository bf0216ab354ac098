"""A run's tensors by their names in checkpoints, which are the same on any mesh: ``model.<parameter>``,
``observers.<name>`` and, from :mod:`titan_ckpt.contents.optimizer_state`, ``optimizer.<parameter>.<key>``. The names of all
diverging replicas but the first begin with ``replica-N.``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_ckpt.contents.plain_values import Unsaveable
from titan_ckpt.format.dtypes import ITEM_BYTES, dtype_name
from titan_ckpt.format.stored import MODEL, OBSERVERS, of_replica
from titan_core.api import CheckpointEvents, ModelPart, World


def model_tensors(parts: Sequence[ModelPart]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a shared parameter once, under its first name."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        kept = part.module.state_dict().keys()
        for name, tensor in (*part.named_parameters(), *part.module.named_buffers()):
            if name in kept:
                tensors[f"{MODEL}.{name}"] = tensor.detach()
    return tensors


def buffer_names(parts: Sequence[ModelPart]) -> Iterator[str]:
    """Return the names of buffers in :func:`model_tensors`."""
    return (f"{MODEL}.{name}" for part in parts for name, _ in part.module.named_buffers())


def observer_tensors(lifecycle: CheckpointEvents) -> dict[str, Tensor]:
    """Return the tensors that observers save.

    Raises:
        Unsaveable: a tensor cannot be saved.
    """
    tensors = {f"{OBSERVERS}.{name}": tensor.detach() for name, tensor in lifecycle.state_tensors().items()}
    for name, tensor in tensors.items():
        require_saveable(tensor, name)
    return tensors


def with_replica_prefix(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return ``tensors`` with :func:`replica_prefix` before each name."""
    return {replica_prefix(world) + name: tensor for name, tensor in tensors.items()}


def replica_prefix(world: World) -> str:
    """Return the prefix of the tensor names of this rank's diverging replica."""
    return of_replica(world.replica)


def require_saveable(tensor: Tensor, name: str) -> None:
    """Require ``tensor`` to be dense and of a supported dtype.

    Raises:
        Unsaveable: it is not. The message calls it ``name``.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise Unsaveable(name, "is a DTensor with a partial placement, whose value no rank holds")
    shard = local(tensor)
    if type(shard) not in (Tensor, nn.Parameter):
        raise Unsaveable(name, f"is a {type(shard).__qualname__}, a tensor subclass whose contents titan-ckpt cannot read")
    if shard.layout is not torch.strided or dtype_name(shard.dtype) not in ITEM_BYTES:
        raise Unsaveable(name, f"is a tensor with {shard.dtype} and {shard.layout}, which titan-ckpt cannot write")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
