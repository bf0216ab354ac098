"""Gradients of parameters that tensor parallelism has divided arrive where autograd would put them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.fake_ranks import fake_ranks
from titan_parallel.local_parameters import divide_parameters

X = torch.arange(6.0).view(2, 3)
WEIGHT = torch.tensor([[3.0, 5.0, 7.0]] * 4)
"""The gradient of the sum of the outputs."""


@pytest.fixture
def linear() -> Iterator[nn.Linear]:
    with fake_ranks(1):
        module = nn.Linear(3, 4)
        divide_parameters(module, init_device_mesh("cpu", (1,)), {"weight": Shard(0), "bias": Replicate()})
        yield module


def shard(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def parameters_of(module: nn.Linear) -> tuple[Tensor, Tensor]:
    weight, bias = module.parameters()
    return weight, bias


def test_backward_passes_and_uses_of_a_parameter_add_up(linear: nn.Linear) -> None:
    weight, bias = parameters_of(linear)
    linear(X).sum().backward()
    (linear(X) + linear(X)).sum().backward()
    assert torch.equal(shard(weight.grad), 3 * WEIGHT) and torch.equal(shard(bias.grad), torch.full((4,), 6.0))
    assert isinstance(weight.grad, DTensor) and weight.grad.placements == (Shard(0),)


def test_requested_gradients_are_returned_and_not_added(linear: nn.Linear) -> None:
    weight, bias = parameters_of(linear)
    (found,) = torch.autograd.grad(linear(X).sum(), [weight])
    assert torch.equal(shard(found), WEIGHT) and weight.grad is None and bias.grad is None


def test_only_the_requested_parameters_get_gradients(linear: nn.Linear) -> None:
    weight, bias = parameters_of(linear)
    linear(X).sum().backward(inputs=[weight])
    assert torch.equal(shard(weight.grad), WEIGHT) and bias.grad is None


def test_hooks_of_a_parameter_are_called(linear: nn.Linear) -> None:
    weight, bias = parameters_of(linear)
    seen: list[Tensor] = []
    weight.register_hook(lambda gradient: 2 * gradient)
    bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(shard(parameter.grad)))
    linear(X).sum().backward()
    assert torch.equal(shard(weight.grad), 2 * WEIGHT)
    assert len(seen) == 1 and torch.equal(seen[0], torch.full((4,), 2.0))


def test_a_gradient_that_someone_else_has_set_is_added_to(linear: nn.Linear) -> None:
    weight, _ = parameters_of(linear)
    assert isinstance(weight, DTensor)
    weight.grad = DTensor.from_local(torch.ones(4, 3), weight.device_mesh, [Replicate()])
    linear(X).sum().backward()
    assert torch.equal(shard(weight.grad), WEIGHT + 1)


def test_a_gradient_of_another_type_is_converted(linear: nn.Linear) -> None:
    weight, _ = parameters_of(linear)
    weight.grad_dtype = torch.float64  # as FSDP sets it for gradients that it reduces in fp32
    linear(X).sum().backward()
    assert shard(weight.grad).dtype == torch.float64 and torch.equal(shard(weight.grad), WEIGHT.double())
