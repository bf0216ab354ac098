"""The world of a simulated rank: a process group in which only this rank exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api import JobMesh, MeshPlan, UserError, World

T = TypeVar("T")


class SimulatedWorld(World):
    """Answers for the ranks that do not exist, as if each had said what this one says."""

    def is_first_along(self, *divides: str) -> bool:
        """Return ``True``: this rank stands for those that count what their group holds."""
        return True

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum host values over the ranks that count, which all have the same; on the device there are no values."""
        if tensor.is_cuda:
            return super().sum(tensor)
        return tensor.mul_(self.data_ranks)

    def max(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``."""
        return super().max(tensor) if tensor.is_cuda else tensor

    def sum_over_replica(self, tensor: Tensor) -> Tensor:
        """See :meth:`sum`."""
        if tensor.is_cuda:
            return super().sum_over_replica(tensor)
        return tensor.mul_(self.data_ranks // self.plan.diverging_replicas)

    def sum_later(self, tensor: Tensor, over_replica: bool = False) -> Callable[[], Tensor]:
        """See :meth:`sum` and :meth:`sum_over_replica`."""
        summed = self.sum_over_replica(tensor) if over_replica else self.sum(tensor)
        return lambda: summed

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``."""
        return super().broadcast(tensor) if tensor.is_cuda else tensor

    def gather(self, value: T) -> list[T]:
        """Return ``value`` once per rank."""
        return [value] * self.size

    def on_first_rank(self, find: Callable[[], T]) -> T:
        """Call ``find`` here, whatever this rank's number."""
        return find()

    def raise_together(self, mistake: UserError | None) -> None:
        """Raise ``mistake``, if any."""
        if mistake is not None:
            raise mistake

    def new_background_group(self) -> dist.ProcessGroup:
        """Return a new group of all ranks."""
        group = dist.new_group(backend="fake")
        assert isinstance(group, dist.ProcessGroup)
        return group


@contextmanager
def fake_world(rank: int, plan: MeshPlan, device: torch.device) -> Iterator[SimulatedWorld]:
    """Join a world in which only ``rank`` exists."""
    with fake_process_group(rank, plan.world_size):
        mesh = JobMesh(plan, device.type)
        yield SimulatedWorld(rank, device, plan, mesh, _replica_group(rank, plan))


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Make the default process group one in which only ``rank`` exists."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _replica_group(rank: int, plan: MeshPlan) -> dist.ProcessGroup | None:
    """Return the group of the ranks that train the same diverging replica as ``rank``."""
    if plan.diverging_replicas == 1:
        return None
    group = dist.new_group(next(replica for replica in plan.replicas if rank in replica))
    assert isinstance(group, dist.ProcessGroup)
    return group


def local_device(rank: int) -> torch.device:
    """Return the device of ``rank``, and make it the current one."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
