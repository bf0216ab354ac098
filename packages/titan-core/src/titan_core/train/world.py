"""Joining and leaving the world: process group, device mesh, and the check that all ranks run the same job."""

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
from titan_core.api.simulation import current_simulation
from titan_core.api.tools.device import backend_for, choose_device
from titan_core.api.torch_private import forget_meshes, reset_compiler
from titan_core.api.world import World


@contextmanager
def join_world(job: Job) -> Iterator[World]:
    """Join the ranks that torchrun's environment describes (without it, a world of one), and leave them at the end.

    Raises:
        UserError: the device does not exist, or the ranks do not run the same job.
    """
    simulation = current_simulation()
    if simulation is not None:
        try:
            with simulation.join(job) as world:
                yield world
        finally:
            _forget_job()
        return
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
        # Before the mesh: ranks that disagree on its shape would deadlock while making it.
        require_same_job(job)
        yield World(dist.get_rank(), device, plan, JobMesh(plan, device.type), _replica_group(plan))
        failed = False
    finally:
        # Without this about a quarter of gloo runs end in SIGABRT (torch 2.15). With NCCL it waits for the other ranks,
        # which may never come after an error; there the process ends without it.
        if not (failed and device.type == "cuda" and plan.world_size > 1):
            dist.destroy_process_group()
        _forget_job()


def _replica_group(plan: MeshPlan) -> dist.ProcessGroup | None:
    """Make one group per diverging replica of the weights; return the group of this rank."""
    if plan.diverging_replicas == 1:
        return None
    ranks = torch.arange(plan.world_size).view([plan.degrees[dim.name] for dim in plan.dims])
    diverging = [axis for axis, dim in enumerate(plan.dims) if dim.diverges]
    replicas = ranks.movedim(diverging, list(range(len(diverging)))).reshape(plan.diverging_replicas, -1)
    group, _ = dist.new_subgroups_by_enumeration(replicas.tolist())
    assert isinstance(group, dist.ProcessGroup)  # every rank is in a group
    return group


def _forget_job() -> None:
    """Clear process-wide caches, so that nothing of this job affects the next job of this process."""
    reset_compiler()  # otherwise it takes sizes that differ from those of this job for dynamic sizes
    forget_meshes()


def require_same_job(job: Job) -> None:
    """Compare the resolved config and the plugins of all ranks.

    Raises:
        UserError: a rank differs from rank 0. Raised on every rank, with one problem per rank that differs.
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
                f"its job differs from that of rank 0 in {_differences_of(identities[0], identities[rank])}",
                "start all ranks with the same config and the same packages",
            )
            for rank in different
        )
    )


def _differences_of(first: object, here: object) -> str:
    """Return the differences. Secrets are compared but not shown."""
    return ", ".join(_differences(first, here)) or "a secret (the value of a key such as a password, or within an address)"


def _differences(first: object, here: object, path: str = "") -> list[str]:
    if isinstance(first, dict) and isinstance(here, dict):
        keys = dict.fromkeys((*first, *here))
        return [line for key in keys for line in _differences(first.get(key), here.get(key), f"{path}.{key}".lstrip("."))]
    return [] if first == here else [f"{path} ({first!r} on rank 0, {here!r} here)"]
