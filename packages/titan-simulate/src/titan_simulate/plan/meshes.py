"""Meshes of a plan, and ranks on them. Free of torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from titan_core.api import MeshPlan


def smallest_mesh(mesh: MeshPlan) -> MeshPlan:
    """Return the smallest mesh that has the blocks of ``mesh``: without stages, with no more ranks that shard their
    parameters than views need, and two replicas if nothing shards them."""
    degrees = dict(mesh.degrees)
    batch = [dim for dim in mesh.dims if dim.divides == "batch" and dim.sees_different_data and dim.data_parallel != "own"]
    for dim in mesh.dims:
        degrees[dim.name] = 1 if dim.divides == "layers" or dim in batch else degrees[dim.name]
    sharding = [dim.name for dim in batch if dim.data_parallel == "shard" and mesh.degrees[dim.name] > 1]
    if sharding:
        fewest = 1
        while not _holds_views(mesh, {**degrees, sharding[0]: fewest}):
            fewest += 1
        degrees[sharding[0]] = 2 * fewest
    elif not is_sharded(mesh):
        replicated = [dim.name for dim in batch if mesh.degrees[dim.name] > 1]
        degrees |= dict.fromkeys(replicated[:1], 2)
    return MeshPlan(mesh.dims, degrees, mesh.views, mesh.view_degrees)


def is_sharded(mesh: MeshPlan) -> bool:
    """Whether data parallelism shards parameters."""
    return any(mesh.degrees[name] > 1 for name in mesh.data_dims("shard"))


def _holds_views(mesh: MeshPlan, degrees: Mapping[str, int]) -> bool:
    plan = MeshPlan(mesh.dims, degrees)
    return all(plan.borrowed(view) % mesh.view_degrees[view.name] == 0 for view in mesh.views)


def undivided(mesh: MeshPlan, experts: Collection[str]) -> MeshPlan:
    """Return a mesh of as many ranks on which data parallelism has those that divide sequences, weights or layers.

    Args:
        experts: degree keys of views that stay as they are.
    """
    batch = [dim for dim in mesh.dims if dim.divides == "batch" and dim.data_parallel == "shard" and not dim.diverges]
    if not batch:
        return mesh
    degrees = dict(mesh.degrees)
    for dim in mesh.dims:
        if dim.divides != "batch":
            degrees[batch[0].name] *= degrees[dim.name]
            degrees[dim.name] = 1
    views = {view.name: mesh.view_degrees[view.name] if view.degree_key in experts else 1 for view in mesh.views}
    return replace(mesh, degrees=degrees, view_degrees=views)


def number_of_ranks(mesh: MeshPlan, names: Iterable[str]) -> int:
    """Return the product of the degrees of dimensions, by name."""
    return math.prod(mesh.degrees[name] for name in names)


def shares_parameters(mesh: MeshPlan, ranks: Sequence[int]) -> bool:
    """Whether data parallelism has parameters that ``ranks``, of which rank 0 is one, share: they differ along dimensions
    only whose ranks see different data, or are the remainder of a view that divides parameters."""
    other = [dim for dim in mesh.dims if not dim.sees_different_data]
    if len({tuple(_coordinates(mesh, rank)[dim.name] for dim in other) for rank in ranks}) == 1:
        return True
    views = [view for view in mesh.views if view.shards_parameters and mesh.view_degrees[view.name] > 1]
    return any(tuple(ranks) == ranks_along(mesh, view.borrows)[:: mesh.view_degrees[view.name]] for view in views)


def _coordinates(mesh: MeshPlan, rank: int) -> dict[str, int]:
    """Return the place of a rank along each dimension."""
    found = {}
    for dim in reversed(mesh.dims):
        rank, found[dim.name] = divmod(rank, mesh.degrees[dim.name])
    return found


def ranks_along(mesh: MeshPlan, names: Collection[str]) -> tuple[int, ...]:
    """Return the ranks that differ from rank 0 along the dimensions ``names`` only."""
    strides, inside = {}, 1
    for dim in reversed(mesh.dims):
        strides[dim.name] = inside
        inside *= mesh.degrees[dim.name]
    places = [range(mesh.degrees[dim.name]) if dim.name in names else range(1) for dim in mesh.dims]
    steps = [strides[dim.name] for dim in mesh.dims]
    return tuple(sum(a * b for a, b in zip(place, steps, strict=True)) for place in itertools.product(*places))
