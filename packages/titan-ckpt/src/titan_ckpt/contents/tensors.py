"""A run's tensors by their names in checkpoints, which are the same on any mesh: ``model.<parameter>``,
``observers.<name>`` and, from :mod:`titan_ckpt.contents.optimizer_state`, ``optimizer.<parameter>.<key>``. The names of all
diverging replicas but the first begin with ``replica-N.``."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_ckpt.contents.plain_values import Unsaveable
from titan_ckpt.format.chunks import bytes_of, local
from titan_ckpt.format.dtypes import ITEM_BYTES, dtype_name, overflows
from titan_ckpt.format.stored import MODEL, OBSERVERS, of_replica
from titan_core.api import CheckpointEvents, ModelPart, Problem, UserError, World, matches
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.optimizers import global_offset

log = logging.getLogger(__name__)
MAKE_EQUAL = (
    "all-reduce it where it is updated, save a DTensor sharded over all dimensions along which ranks differ, or exclude a "
    "buffer from checkpoints with persistent=False"
)


def model_tensors(parts: Sequence[ModelPart]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a shared parameter once, under its first name."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        kept = part.module.state_dict().keys()
        for name, tensor in (*part.named_parameters(), *part.module.named_buffers()):
            if name in kept:
                tensors[f"{MODEL}.{name}"] = tensor.detach()
    return tensors


def without_absent(job: AssembledJob, tensors: Mapping[str, Tensor], stored: Iterable[str]) -> dict[str, Tensor]:
    """Return ``tensors``, to load weights into, without those that transforms add to the model and that are not ``stored``:
    they keep their initial values."""
    added, known = [f"{MODEL}.{pattern}" for pattern in job.added], set(stored)
    return {name: tensor for name, tensor in tensors.items() if name in known or not matches(name, added)}


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


def require_equal_on_ranks(tensors: Mapping[str, Tensor], world: World) -> None:
    """Require tensors to be equal on all ranks that have a tensor of the same name, and DTensors of observers on all ranks
    that have the same shard, if their mesh lacks a dimension: ranks may differ along it. Collective.

    Raises:
        Unsaveable: a tensor differs; on every rank. The message names it.
    """
    if world.size == 1:
        return
    whole = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    others = math.prod(world.plan.degrees[dim.name] for dim in world.plan.dims if dim.diverges or dim.divides == "layers")
    shards = {
        (name, global_offset(tensor)): tensor.to_local()
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) and f"{OBSERVERS}." in name and tensor.device_mesh.size() * others < world.size
    }
    of_shards = digests_of({f"{name} from {list(offset)}": tensor for (name, offset), tensor in shards.items()})
    digests = digests_of(whole) | of_shards
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


def require_patterns_match(job: AssembledJob, patterns: Sequence[str], names: Iterable[str], place: str) -> None:
    """Require each of ``patterns`` to match one of ``names``, the names of tensors in ``place`` or in the job.

    Raises:
        UserError: a pattern matches nothing.
    """
    known = list(names)
    unmatched = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in known)]
    if unmatched:
        fix = f"use names such as {known[0]!r}" if known else "remove the pattern: there are no tensors"
        why, key = f"matches nothing in {place} or in this job", "checkpoint.exclude_from_loading"
        raise UserError(*(Problem(job.config.where(key, pattern), why, fix) for pattern in unmatched))
