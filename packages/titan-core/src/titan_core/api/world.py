"""The processes that train together: their mesh, and the few collectives that the trainer and its plugins need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api.errors import UserError
from titan_core.api.job_mesh import JobMesh
from titan_core.api.mesh import MeshDim, MeshPlan

T = TypeVar("T")


BACKGROUND = "background"
"""Description of process groups whose collectives training does not wait for."""


@dataclass(frozen=True)
class World:
    """This rank's place among all."""

    rank: int
    device: torch.device
    plan: MeshPlan
    mesh: JobMesh
    copy_group: dist.ProcessGroup | None = None
    """The ranks that train the same copy of the weights, where that is not all of them."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.plan.world_size

    def coordinate(self, dim: str) -> int:
        """This rank's index along the mesh dimension or view ``dim``; 0 where the job has none of that name."""
        return self.mesh[dim].get_local_rank() if dim in self.mesh else 0

    @property
    def data_rank(self) -> int:
        """Index of this rank among those that see different sequences."""
        return self._index_along(dim for dim in self.plan.dims if dim.divides == "batch")

    @property
    def replica(self) -> int:
        """Index of the diverging replica that this rank trains; 0 where all ranks train the same weights."""
        return self._index_along(dim for dim in self.plan.dims if dim.diverges)

    def _index_along(self, dims: Iterable[MeshDim]) -> int:
        """Index of this rank among those that differ along ``dims``."""
        index = 0
        for dim in dims:
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
