"""The gradient norm and clipping, for gradients divided in any way."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from harness.one_of_many import ISLANDS, OneOfMany
from titan_core.loop.optimizer_step import clip_gradients, global_norm, local_gradients
from titan_core.loop.world import join_world
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [(0.0, 1.0, 1), (0.5, 1.0, 1), (1.0, 1.0, 1), (2.0, 1.0, 1 / 2), (80.0, 1.0, 1 / 80), (3.0, 0.5, 1 / 6), (3.0, 10.0, 1)],
)
@pytest.mark.parametrize("pieces", [1, 4])
def test_clipping_scales_down_and_never_up(norm: float, limit: float, factor: float, pieces: int) -> None:
    gradients = {1: [torch.full((2,), 3.0), torch.full((1,), 5.0)], pieces: [torch.full((3,), 7.0)]}
    before = {key: [tensor.clone() for tensor in tensors] for key, tensors in gradients.items()}
    clip_gradients(gradients, torch.tensor(norm), limit)
    for key, tensors in before.items():
        for original, clipped in zip(tensors, gradients[key], strict=True):
            torch.testing.assert_close(clipped, original * factor, rtol=0.0 if norm < limit else 2e-6, atol=0.0)


@pytest.mark.parametrize(
    ("degrees", "pieces", "weight"),
    [
        ({}, 1, 1.0),
        ({"dp_shard": 4}, 4, 1.0),  # this rank holds a quarter
        ({"dp_shard": 4}, 1, 1 / 4),  # each of four ranks holds all
        ({"dp_replicate": 2, "dp_shard": 2}, 2, 1 / 2),
        ({"tp": 2, "dp_shard": 2}, 4, 1.0),
        ({"pp": 2, "dp_shard": 2}, 2, 1.0),  # ranks of another stage hold none
        ({"pp": 4}, 1, 1.0),
    ],
    ids=str,
)
def test_each_element_counts_once_in_the_norm(degrees: dict[str, int], pieces: int, weight: float) -> None:
    world = OneOfMany(degrees)
    assert global_norm({pieces: [torch.tensor([3.0, 4.0])]}, world).item() == pytest.approx(5.0 * math.sqrt(weight))


def test_the_norm_covers_all_groups_and_all_ranks_of_the_replica() -> None:
    world = OneOfMany({"dp_shard": 2})
    object.__setattr__(world, "others", 11.0)  # the sum of squares on the other rank
    norm = global_norm({2: [torch.tensor([1.0]), torch.tensor([2.0])], 1: [torch.tensor([4.0])]}, world)
    assert norm.item() == pytest.approx(math.sqrt(1 + 4 + 16 / 2 + 11))
    assert global_norm({}, OneOfMany({})).item() == 0.0
    # Each replica of the weights has its own norm; in it, no other rank holds this element.
    assert global_norm({1: [torch.tensor([2.0])]}, OneOfMany({"islands": 2}, extra=(ISLANDS,))).item() == 2.0


def test_norms_of_bf16_gradients_are_summed_in_fp32() -> None:
    # bf16 represents 16.125, but neither its square nor the sum of such squares.
    gradients = {1: [torch.tensor([16.125], dtype=torch.bfloat16)], 2: [torch.tensor([16.125], dtype=torch.bfloat16)]}
    assert global_norm(gradients, OneOfMany({"dp_shard": 2})).item() == pytest.approx(16.125 * math.sqrt(1.5), rel=1e-6)


def norms_of_dtensors(folder: str) -> list[float]:
    """Return this rank's norm of gradients of every kind of DTensor, and the norm of the whole gradients."""
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

    os.chdir(folder)
    with join_world(make_job("tiny", {"parallelism.tensor_parallel_degree": 2, "job.device": "cpu"})) as world:
        parameters, wholes = [], []
        kinds: list[list[Placement]] = [
            [Shard(0), Shard(1)],
            [Replicate(), Shard(0)],
            [Shard(0), Replicate()],
            [Replicate()] * 2,
        ]
        for number, placements in enumerate(kinds):
            whole = torch.arange(12.0).view(4, 3) + number
            parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 3), world.mesh.device_mesh, placements))
            parameter.grad = distribute_tensor(whole.clone(), world.mesh.device_mesh, placements)
            parameters.append(parameter)
            wholes.append(whole)
        summed = nn.Parameter(distribute_tensor(torch.zeros(4), world.mesh.device_mesh, [Replicate()] * 2))
        mine = torch.full((4,), 1.0 + world.coordinate("tp"))  # 1 on one rank, 2 on the other: 3 together
        summed.grad = DTensor.from_local(mine, world.mesh.device_mesh, [Replicate(), Partial()])
        parameters += [summed, nn.Parameter(torch.zeros(2))]  # the last has no gradient
        wholes.append(torch.full((4,), 3.0))
        gradients = local_gradients(parameters)
        norm = global_norm(gradients, world).item()
        assert isinstance(summed.grad, DTensor)
        assert summed.grad.placements == (Replicate(), Replicate())
        assert torch.equal(summed.grad.to_local(), wholes[-1])
        clip_gradients(gradients, torch.tensor(2.0), max_norm=1.0)  # clips the gradients that the optimizer uses
        for parameter, whole in zip(parameters, wholes, strict=False):
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), whole / 2)
        return [norm, torch.cat([whole.flatten() for whole in wholes]).norm().item()]


def test_the_norm_of_dtensors_is_that_of_the_whole_gradients(gloo: GlooPool, tmp_path: Any) -> None:
    for norm, expected in gloo.run(4, norms_of_dtensors, str(tmp_path)):
        assert norm == pytest.approx(expected, rel=1e-6)
