"""Global gradient norm, and gradient clipping, for parameters sharded in any way.

torch's clipping needs all gradients on one mesh. Here each rank sums the squares of its local elements, each divided by the
number of ranks that hold the element, and one all-reduce of a scalar sums over the ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from titan_core.api.torch_private import multiply_
from titan_core.api.world import World

SUM, REPLICATE = Partial(), Replicate()


@torch.no_grad()
def local_gradients(parameters: Iterable[nn.Parameter]) -> dict[int, list[Tensor]]:
    """Return this rank's local gradients, grouped by the number of shards that the whole gradient is divided into."""
    parameters = list(parameters)
    _sum_partial(parameters)
    by_pieces: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient: Tensor | None = parameter.grad
        if isinstance(gradient, DTensor):
            by_pieces[_pieces(gradient.placements, gradient.device_mesh.shape)].append(gradient.to_local())
        elif gradient is not None:
            by_pieces[1].append(gradient)
    return by_pieces


@lru_cache
def _pieces(placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> int:
    """Return the number of shards of a tensor on a mesh of ``sizes``."""
    # Not ``is_shard``, which is false for the strided shards of TP under FSDP.
    return math.prod(size for placement, size in zip(placements, sizes, strict=True) if not placement.is_replicate())


@lru_cache
def _partial_dims(placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Return the dimensions of the mesh over which a tensor remains to be summed."""
    return tuple(dim for dim, placement in enumerate(placements) if placement.is_partial())


def _sum_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients that ranks computed from their own positions: once per step, not per microbatch, and all of them by
    one collective for each dimension of the mesh, because each may be as small as a norm's gain."""
    partial: dict[tuple[DeviceMesh, int, torch.dtype], list[tuple[nn.Parameter, DTensor]]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not (dims := _partial_dims(gradient.placements)):
            continue
        assert isinstance(parameter, DTensor)
        if len(dims) == 1 and gradient.placements[dims[0]] == SUM and parameter.placements[dims[0]] == REPLICATE:
            partial[gradient.device_mesh, dims[0], gradient.dtype].append((parameter, gradient))
        else:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for (mesh, dim, _), pairs in partial.items():
        locals_ = [gradient.to_local() for _, gradient in pairs]
        flat = torch.cat([local.reshape(-1) for local in locals_])
        dist.all_reduce(flat, group=mesh.get_group(dim))
        for (parameter, gradient), local, summed in zip(
            pairs, locals_, flat.split([local.numel() for local in locals_]), strict=True
        ):
            placements = (*gradient.placements[:dim], REPLICATE, *gradient.placements[dim + 1 :])
            parameter.grad = DTensor.from_local(
                summed.view_as(local), mesh, placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
            )


@torch.no_grad()
def global_norm(gradients: dict[int, list[Tensor]], world: World) -> Tensor:
    """Return the 2-norm over all gradients: an fp32 scalar, equal on all ranks that share a replica of the weights."""
    # Ranks of one pipeline stage. An element of a gradient in n shards is on ``holders / n`` of them.
    stages = math.prod(world.plan.degrees[dim.name] for dim in world.plan.dims if dim.divides == "layers")
    holders = world.size // world.plan.diverging_replicas // stages
    total = torch.zeros((), dtype=torch.float32, device=world.device)
    for pieces, tensors in gradients.items():
        norm = torch.nn.utils.get_total_norm(tensors)
        total += norm.float().to(total.device) ** 2 * (pieces / holders)
    return world.sum_over_replica(total).sqrt()


@torch.no_grad()
def clip_gradients(gradients: dict[int, list[Tensor]], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place by ``max_norm / norm`` if that is below 1."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for tensors in gradients.values():
        multiply_(tensors, scale.to(tensors[0].device))
