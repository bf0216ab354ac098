"""The processes that train together: process group, device mesh, and the few collectives that the trainer itself needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but does not export it to type checkers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_core.api.errors import Problem, UserError
from titan_core.api.job import Job
from titan_core.api.sections import CommSection, JobSection
from titan_core.api.tools.device import backend_for, choose_device
from titan_core.job.mesh_plan import MeshPlan

T = TypeVar("T")

BACKGROUND = "background"
"""Description of process groups whose collectives training does not wait for."""


@dataclass(frozen=True)
class World:
    """This rank's place among all."""

    rank: int
    device: torch.device
    plan: MeshPlan
    mesh: DeviceMesh
    copy_group: dist.ProcessGroup | None = None
    """The ranks that train the same copy of the weights, where that is not all of them."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.plan.world_size

    def coordinate(self, dim: str) -> int:
        """This rank's index along the mesh dimension ``dim``; 0 where the job has no such dimension."""
        names = self.mesh.mesh_dim_names or ()
        coordinates = self.mesh.get_coordinate()
        return coordinates[names.index(dim)] if coordinates is not None and dim in names else 0

    @property
    def data_rank(self) -> int:
        """Index of this rank among those that see different sequences."""
        index = 0
        for dim in self.plan.dims:
            if dim.divides == "batch":
                index = index * self.plan.degrees[dim.name] + self.coordinate(dim.name)
        return index

    @property
    def copy(self) -> int:
        """Index of the copy of the weights that this rank trains; 0 unless copies train apart."""
        index = 0
        for dim in self.plan.dims:
            if dim.copies:
                index = index * self.plan.degrees[dim.name] + self.coordinate(dim.name)
        return index

    @property
    def data_ranks(self) -> int:
        """How many see different sequences."""
        return self.plan.batch_degree

    def is_first_along(self, *divides: str) -> bool:
        """Whether this rank is the first along every dimension that divides one of ``divides``: of the ranks that hold the
        same thing, the one that counts it."""
        return all(self.coordinate(dim.name) == 0 for dim in self.plan.dims if dim.divides in divides)

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over all ranks, in place. A CPU tensor travels by gloo, without waiting for the device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The largest of each element of ``tensor`` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum_over_copy(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over the ranks that train the same copy of the weights, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.copy_group)
        return tensor

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def new_background_group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks for work beside training, which may wait for disks: comm.train_timeout_seconds is not
        for it. To be called by all ranks."""
        group = dist.new_group(backend="gloo", group_desc=BACKGROUND)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        return group

    def on_first_rank(self, find: Callable[[], T]) -> T:
        """What ``find`` gives on rank 0, on every rank.

        Raises:
            Exception: what it raises there, on every rank (as a RuntimeError what need not be the same elsewhere).
        """
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box = [find(), None]
            except Exception as error:  # noqa: BLE001 - it is raised below, on all ranks
                box = [None, error if isinstance(error, UserError | OSError) else RuntimeError(repr(error))]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        return box[0]

    def raise_together(self, mistake: UserError | None) -> None:
        """Called by all ranks, each with what it found wrong, if anything.

        Raises:
            UserError: some rank found something; on every rank, with what all found.
        """
        told = (error.problems for error in self.gather(mistake) if error is not None)
        problems = dict.fromkeys(problem for problems in told for problem in problems)
        if problems:
            raise UserError(*problems) from mistake


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
        # A world of one needs no network, and lets one process run the same code as many.
        dist.init_process_group(backend_for(device), store=HashStore(), rank=0, world_size=1)
    failed = True
    try:
        # Before the mesh: ranks that disagree on its shape would wait for each other while they make it.
        require_same_job(job)
        # Dimensions of size 1 are left out: each would cost a process group on every rank. dp_shard is always there, since
        # FSDP's mixed precision is wanted at any degree.
        dims = {name: degree for name, degree in plan.degrees.items() if degree > 1 or name == "dp_shard"}
        mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        yield World(dist.get_rank(), device, plan, mesh, _copy_group(plan))
        failed = False
    finally:
        # Without this about a quarter of gloo runs end in SIGABRT (torch 2.15). NCCL's way of leaving waits for the other
        # ranks, which on an error may never come; there the end of the process has to do.
        if not (failed and device.type == "cuda" and plan.world_size > 1):
            dist.destroy_process_group()
        _forget_job()


def _copy_group(plan: MeshPlan) -> dist.ProcessGroup | None:
    """A group for each combination of places along the dimensions that make copies; this rank's is returned."""
    if plan.copies == 1:
        return None
    ranks = torch.arange(plan.world_size).view([plan.degrees[dim.name] for dim in plan.dims])
    apart = [place for place, dim in enumerate(plan.dims) if dim.copies]
    by_copy = ranks.movedim(apart, list(range(len(apart)))).reshape(plan.copies, -1)
    group, _ = dist.new_subgroups_by_enumeration(by_copy.tolist())
    assert isinstance(group, dist.ProcessGroup)  # every rank is in one
    return group


def _forget_job() -> None:
    """The next job of this process must find nothing of this one.

    DTensor remembers what it once found out by the shape of a mesh, and with it process groups that are gone (private; the
    same in torch 2.11 to 2.15). The compiler takes sizes that differ from those of an earlier job for sizes that vary.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()


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
