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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from titan_core.api import World
from titan_core.torch_private import multiply_


@torch.no_grad()
def local_gradients(parameters: Iterable[nn.Parameter]) -> dict[int, list[Tensor]]:
    """Return this rank's local gradients, grouped by the number of shards that the whole gradient is divided into. Gradients
    that are still partial are summed in place."""
    by_pieces: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient: Tensor | None = parameter.grad
        if isinstance(gradient, DTensor):
            if _is_partial(gradient.placements):
                assert isinstance(parameter, DTensor)
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
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
def _is_partial(placements: tuple[Placement, ...]) -> bool:
    """Whether ranks hold addends of a tensor. Titan's own parallelisms sum their gradients; layers of a third party, such as
    torch's tensor parallelism, may leave it to the optimizer step."""
    return any(placement.is_partial() for placement in placements)


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
