"""Kinds of blocks: what decides the operators of a block, and the small jobs whose traces show them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from titan_core.api import MeshPlan, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.text import show

if TYPE_CHECKING:
    from titan_simulate.engine.simulate import Train
    from titan_simulate.engine.stub_libraries import Device
    from titan_simulate.estimate.traced_rank import TracedRank

LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
JobOn = Callable[[int, Sequence[Override]], AssembledJob]
"""(number of ranks, overrides) -> the recipe's job."""


@dataclass(frozen=True)
class Kind:
    """What decides the operators of a block, and differs between the jobs of a plan."""

    degrees: tuple[tuple[str, int], ...]
    """Config key -> degree, of the dimensions that divide sequences or weights, and of views."""
    chosen: tuple[tuple[str, Any], ...]
    """Config key -> value, of transforms that change blocks."""
    sharded: bool = True
    """Whether data parallelism shards parameters."""

    @property
    def where(self) -> tuple[object, ...]:
        """What of it the mesh decides."""
        return (*self.degrees, self.sharded)

    def ranks(self, divided: Collection[str]) -> int:
        """Return the number of ranks that divide a block along the dimensions whose degree keys are ``divided``."""
        return math.prod(degree for key, degree in self.degrees if key in divided)

    def descends_from(self, other: Kind, divided: Collection[str], ignored: Collection[str]) -> bool:
        """Whether blocks of this kind are those of ``other``, divided among more ranks.

        Args:
            divided: degree keys of the dimensions that divide a block.
            ignored: those of views along which ranks only exchange activations.
        """
        degrees, chosen = dict(other.degrees), dict(self.chosen)
        for key, degree in self.degrees:
            if key not in ignored and (degree % degrees[key] if key in divided else degree != degrees[key]):
                return False
        own = {key for key, degree in other.degrees if degree > 1 and key in ignored}
        if any(dict(self.degrees)[key] % degrees[key] for key in own):
            return False
        return all(chosen.get(key) == value for key, value in other.chosen)


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


def small_job(mesh: MeshPlan, kind: Kind, batch: int) -> tuple[int, list[Override]]:
    """Return the number of ranks, and the overrides of the recipe, of a small job with blocks of ``kind`` on
    :func:`smallest_mesh`, that has one microbatch of ``batch`` sequences."""
    values: dict[str, Any] = {dim.degree_key: mesh.degrees[dim.name] for dim in mesh.dims}
    values |= {view.degree_key: mesh.view_degrees[view.name] for view in mesh.views}
    values |= {**dict(kind.chosen), LOCAL_BATCH: batch, GLOBAL_BATCH: batch * mesh.batch_degree}
    return mesh.world_size, [Override(key, text_of(value)) for key, value in values.items()]


def text_of(value: Any) -> str:
    """Return a value as an override has it."""
    return "none" if value is None else value if isinstance(value, str) else show(value)


SmallJob = tuple[int, Sequence[Override], int]
"""Number of ranks, overrides of the recipe, most blocks that are simulated."""
Taken = Any
"""A :class:`~titan_simulate.estimate.traced_rank.TracedRank`, or a UserError or text that says why there is none."""


def take_all(job_on: JobOn, train: Train, device: Device, jobs: Sequence[SmallJob]) -> list[TracedRank | UserError | str]:
    """Return the traces of small jobs, each made in a fork of this process."""
    from titan_simulate.engine import forks

    return forks.call_in_forks(
        [partial(_take, job_on, train, device, *job) for job in jobs], at_once=len(os.sched_getaffinity(0))
    )


def _take(
    job_on: JobOn, train: Train, device: Device, ranks: int, overrides: Sequence[Override], blocks: int
) -> TracedRank | UserError | str:
    from titan_simulate.estimate.traced_rank import take

    try:
        return take(
            lambda more: job_on(ranks, [*overrides, *more]), train, 0, blocks, device, {"data.logical_shards": "0"},
            lambda job: job, None, short=False, checks_model=False,
        )  # fmt: skip
    except UserError as error:
        return error
    except Exception as error:  # noqa: BLE001 - one that cannot be simulated is reported among the losers
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
