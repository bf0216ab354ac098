"""The ranks of a job: their mesh, and the few collectives that the trainer and its plugins need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api.parallel.job_mesh import JobMesh
from titan_core.api.parallel.mesh import MeshDim, MeshPlan
from titan_core.api.parallel.tree import (
    FIRST_SUM_TAG,
    LONGEST_RING,
    gather_objects,
    in_background,
    portable,
    reduce_over_tree,
)
from titan_core.api.plugins.errors import PluginFailure, UserError

T = TypeVar("T")


BACKGROUND = "background"
"""Description of process groups whose collectives do not block training."""


@dataclass(frozen=True)
class World:
    """All ranks of a job, as seen from this one."""

    rank: int
    """This rank's index among all ranks of the job, from 0."""
    device: torch.device
    """The device on which this rank computes."""
    plan: MeshPlan
    """The dimensions and views of the mesh, and their sizes."""
    mesh: JobMesh
    """The process groups of the mesh, as torch's device meshes."""
    replica_group: dist.ProcessGroup | None = None
    """The ranks that train the same replica; ``None``: all ranks."""
    _tags: Iterator[int] = field(
        default_factory=lambda: itertools.count(FIRST_SUM_TAG), init=False, repr=False, compare=False
    )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.plan.world_size

    def coordinate(self, dim: str) -> int:
        """Return this rank's index along the mesh dimension or view ``dim``; 0 if the job does not have it."""
        return self.mesh[dim].get_local_rank() if dim in self.mesh else 0

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks that see different sequences."""
        return self._index_along(dim for dim in self.plan.dims if dim.divides == "batch")

    @property
    def replica(self) -> int:
        """Index of the diverging replica that this rank trains; 0 if all ranks train the same weights."""
        return self._index_along(dim for dim in self.plan.dims if dim.diverges)

    def _index_along(self, dims: Iterable[MeshDim]) -> int:
        """Return this rank's index among the ranks that differ along ``dims``."""
        index = 0
        for dim in dims:
            index = index * self.plan.degrees[dim.name] + self.coordinate(dim.name)
        return index

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that see different sequences."""
        return self.plan.batch_degree

    def is_first_along(self, *divides: str) -> bool:
        """Whether this rank is first along every dimension that divides one of ``divides``. Among ranks that hold the same
        data, this selects the one that counts it."""
        return all(self.coordinate(dim.name) == 0 for dim in self.plan.dims if dim.divides in divides)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks in place. A CPU tensor uses gloo, without waiting for the device."""
        return self._reduced(tensor, torch.add, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum of ``tensor`` over all ranks in place."""
        return self._reduced(tensor, torch.maximum, dist.ReduceOp.MAX)

    def sum_over_replica(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks that train the same replica in place."""
        return self._reduced(tensor, torch.add, dist.ReduceOp.SUM, self.replica_group)

    def sum_later(self, tensor: Tensor, over_replica: bool = False) -> Callable[[], Tensor]:
        """Start :meth:`sum` (or :meth:`sum_over_replica`) in the background, and return a function that waits for the
        result. Ranks must start their collectives in the same order."""
        if self.size == 1:
            return lambda: tensor
        group, tag = self.replica_group if over_replica else None, next(self._tags)
        if self._takes_tree(tensor, group):
            summed = in_background(lambda: reduce_over_tree(tensor, torch.add, group, tag))
            wait: Callable[[], object] = summed.result
        else:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            wait = work.wait

        def result() -> Tensor:
            wait()
            return tensor

        return result

    def _reduced(
        self,
        tensor: Tensor,
        combine: Callable[[Tensor, Tensor], Tensor],
        operation: dist.ReduceOp.RedOpType,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        tag = next(self._tags)
        if self.size > 1 and self._takes_tree(tensor, group):
            reduce_over_tree(tensor, combine, group, tag)
        elif self.size > 1:
            dist.all_reduce(tensor, operation, group=group)
        return tensor

    @staticmethod
    def _takes_tree(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
        return tensor.device.type == "cpu" and dist.get_world_size(group) > LONGEST_RING

    def broadcast(self, tensor: Tensor) -> Tensor:
        """``tensor`` of rank 0 on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather(self, value: T) -> list[T]:
        """See :func:`gather_objects`."""
        return gather_objects(value)

    def new_background_group(self) -> dist.ProcessGroup:
        """Create a gloo group of all ranks for background work, which may wait for disks; comm.train_timeout_seconds does
        not apply to it. All ranks must call it."""
        group = dist.new_group(backend="gloo", group_desc=BACKGROUND)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        return group

    def on_first_rank(self, find: Callable[[], T]) -> T:
        """Call ``find`` on rank 0, and return its result on every rank.

        Raises:
            Exception: the exception that ``find`` raised, on every rank. If it is neither a UserError nor one that Python
                defines, an OSError or RuntimeError that shows it, because other ranks may not be able to unpickle it.
        """
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box = [find(), None]
            except Exception as error:  # noqa: BLE001 - raised below, on all ranks
                box = [None, error if isinstance(error, UserError) else portable(error)]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        return box[0]

    def raise_together(self, mistake: UserError | None) -> None:
        """Raise the mistakes of all ranks on every rank. All ranks must call it, each with its own mistake, if any.

        Raises:
            UserError: some rank has a mistake; lists the problems of all ranks.
        """
        errors = [error for error in self.gather(mistake) if error is not None]
        problems = dict.fromkeys(problem for error in errors for problem in error.problems)
        if problems:
            of_plugin = any(isinstance(error, PluginFailure) for error in errors)
            raise (PluginFailure if of_plugin else UserError)(*problems) from mistake
