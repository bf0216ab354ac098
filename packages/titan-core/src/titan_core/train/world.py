"""The processes that train together: process group, device mesh, and the few collectives that the trainer itself needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_core.api.errors import Problem, UserError
from titan_core.api.job import Job
from titan_core.api.job_mesh import JobMesh
from titan_core.api.mesh import MeshPlan
from titan_core.api.sections import CommSection, JobSection
from titan_core.api.tools.device import backend_for, choose_device
from titan_core.api.torch_private import forget_meshes, reset_compiler
from titan_core.api.world import World


@contextmanager
def join_world(job: Job) -> Iterator[World]:
    """Join the other ranks (as torchrun's environment says; alone without it), and leave them at the end.

    Raises:
        UserError: no such device, or the ranks do not run the same job.
    """
    plan = job.facts.mesh
    device = choose_device(job.config.section(JobSection).device)
    if "RANK" in os.environ:
        timeout = timedelta(seconds=job.config.section(CommSection).init_timeout_seconds)
        dist.init_process_group(backend_for(device), timeout=timeout)
    else:
        # A world of one rank needs no network, and runs the same code as many ranks.
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not exported to type checkers
        dist.init_process_group(backend_for(device), store=store, rank=0, world_size=1)
    failed = True
    try:
        # Before the mesh: ranks that disagree on its shape would wait for each other while they make it.
        require_same_job(job)
        yield World(dist.get_rank(), device, plan, JobMesh(plan, device.type), _copy_group(plan))
        failed = False
    finally:
        # Without this about a quarter of gloo runs end in SIGABRT (torch 2.15). NCCL's way of leaving waits for the other
        # ranks, which on an error may never come; there the end of the process has to do.
        if not (failed and device.type == "cuda" and plan.world_size > 1):
            dist.destroy_process_group()
        _forget_job()


def _copy_group(plan: MeshPlan) -> dist.ProcessGroup | None:
    """A group for each combination of places along the dimensions that make copies; this rank's is returned."""
    if plan.diverging_replicas == 1:
        return None
    ranks = torch.arange(plan.world_size).view([plan.degrees[dim.name] for dim in plan.dims])
    apart = [place for place, dim in enumerate(plan.dims) if dim.diverges]
    by_copy = ranks.movedim(apart, list(range(len(apart)))).reshape(plan.diverging_replicas, -1)
    group, _ = dist.new_subgroups_by_enumeration(by_copy.tolist())
    assert isinstance(group, dist.ProcessGroup)  # every rank is in one
    return group


def _forget_job() -> None:
    """Clear process-wide caches, so that nothing of this job affects the next job of this process."""
    reset_compiler()  # otherwise it takes sizes that differ from those of this job for dynamic sizes
    forget_meshes()


def require_same_job(job: Job) -> None:
    """Compare the resolved config and the plugins of all ranks.

    Raises:
        UserError: on every rank, naming those that differ from rank 0, and in what.
    """
    size = dist.get_world_size()
    digests: list[str | None] = [None] * size
    dist.all_gather_object(digests, job.digest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not different:
        return
    identities: list[dict[str, object] | None] = [None] * size
    dist.all_gather_object(identities, job.identity())
    raise UserError(
        *(
            Problem(
                f"rank {rank}",
                f"its job differs from rank 0's in {_differences_of(identities[0], identities[rank])}",
                "start all ranks with the same config and the same packages",
            )
            for rank in different
        )
    )


def _differences_of(one: object, other: object) -> str:
    """What is different; secrets are compared, and not shown."""
    return ", ".join(_differences(one, other)) or "a secret (a key such as a password, or one within an address)"


def _differences(one: object, other: object, path: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys((*one, *other))
        return [line for key in keys for line in _differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]
    return [] if one == other else [f"{path} ({one!r} on rank 0, {other!r} here)"]
