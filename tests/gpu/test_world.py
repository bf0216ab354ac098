"""The process groups of a job on a GPU: NCCL for tensors on the device, gloo for values on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from harness.on_device import SMALL
from titan_core.loop.world import join_world
from titan_testing.jobs import make_job

pytestmark = pytest.mark.gpu


def test_every_collective_of_a_world_of_one(device: torch.device, in_tmp: Path) -> None:
    """By the real backend: a GPU of its own is all that a rank of NCCL needs."""
    with join_world(make_job("tiny", {**SMALL, "job.device": device.type})) as world:
        assert (world.device.type, world.rank, world.size) == (device.type, 0, 1)
        mesh = world.mesh["dp_shard"]
        group = mesh.get_group()
        assert group._get_backend(world.device).name() == ("nccl" if device.type == "cuda" else "gloo")
        values = torch.arange(8.0, device=world.device)
        for function in (dist.all_reduce, lambda tensor, group: dist.broadcast(tensor, src=0, group=group)):
            found = values.clone()
            function(found, group=group)
            assert torch.equal(found, values)
        for function in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single):
            found = torch.full_like(values, -1.0)
            function(found, values, group=group)
            assert torch.equal(found, values)
        summed = DTensor.from_local(values, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)])
        assert torch.equal(summed.redistribute(placements=[Replicate()]).to_local(), values)


def test_values_on_the_host_do_not_wait_for_the_device(device: torch.device, in_tmp: Path) -> None:
    with join_world(make_job("tiny", {**SMALL, "job.device": device.type})) as world:
        on_host = torch.tensor([3.0, 4.0], dtype=torch.float64)
        dist.all_reduce(on_host)
        assert on_host.tolist() == [3.0, 4.0]
        assert world.gather({"rank": world.rank}) == [{"rank": 0}]
        assert world.on_first_rank(lambda: "found") == "found"
        background = world.new_background_group()
        dist.all_reduce(on_host, group=background)
        assert on_host.tolist() == [3.0, 4.0]
