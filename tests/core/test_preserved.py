"""Forward passes of observers and of validation have no side effects."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from harness.objectives import OfTargets
from titan_core.api import Finding, ModelPart, PendingUpdate, hookimpl
from titan_core.loop.optimizer_step import MissingGradients
from titan_core.model.preserved import preserved_module, preserved_state
from titan_core.plugins.lifecycle import Lifecycle
from titan_testing.gloo_pool import GlooPool


class Counts(nn.Module):
    """Draws random numbers, counts its calls in one buffer, and replaces a second buffer by another tensor."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean + x.mean(0)
        return nn.functional.dropout(self.linear(x)) * random.random()


def part_of(module: nn.Module, finished: list[str]) -> ModelPart:
    layout: Any = None
    return ModelPart(
        module, layout, OfTargets(lambda logits, targets: logits.sum()), after_evaluation=(lambda: finished.append("yes"),)
    )


@pytest.mark.parametrize("fails", [False, True])
def test_state_is_restored(fails: bool) -> None:
    module, finished = Counts(), []
    part = part_of(module, finished)
    module(torch.ones(2, 4)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    values = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    buffers = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
    assert buffers["calls"][1] == 1 and len(values) == 2
    generators = random.getstate(), torch.get_rng_state()

    def look() -> None:
        with preserved_state([part]):
            module.eval()
            module(torch.randn(2, 4))
            module.zero_grad()
            if fails:
                raise ValueError("the observer failed")

    if fails:
        with pytest.raises(ValueError, match="the observer failed"):
            look()
    else:
        look()
    assert finished == ["yes"]
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[1])
    assert module.training and module.linear.training and not module.frozen.training
    for name, parameter in module.named_parameters():
        assert parameter.grad is gradients[name] and torch.equal(parameter.grad, values[name])
    for name, buffer in module.named_buffers():
        assert buffer is buffers[name][0] and torch.equal(buffer, buffers[name][1])


class DrawsAtFindings:
    def __init__(self) -> None:
        self.heard: list[str] = []

    @hookimpl
    def titan_finding(self, finding: Finding) -> None:
        self.heard.append(finding.kind)
        random.random(), torch.rand(1)


def test_observers_of_missing_gradients_do_not_change_training_draws() -> None:
    draws = DrawsAtFindings()
    world: Any = SimpleNamespace(is_first_along=lambda *_: True)
    missing = MissingGradients([("weight", nn.Parameter(torch.ones(2)))], world, Lifecycle([draws]))
    generators = random.getstate(), torch.get_rng_state()
    missing.check(1)
    assert draws.heard == ["no gradient"]
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[1])


def test_a_hook_without_observers_guards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def guards() -> None:
        raise AssertionError("the state of the generators was read")

    monkeypatch.setattr("titan_core.toolkit.random_state.same_generators", guards)
    lifecycle = Lifecycle([DrawsAtFindings()])
    lifecycle.step_start(1)
    assert lifecycle.before_update(cast(PendingUpdate, None)) is False
    assert lifecycle.save_state() == {}


def _divided_buffer() -> list[float]:
    dist.init_process_group("gloo")
    try:
        module = nn.Module()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        calls = distribute_tensor(torch.tensor([1.0, 2.0]), mesh, [Replicate()])
        module.register_buffer("calls", calls)
        with preserved_module(module):
            calls.add_(1)
        return cast(list[float], calls.to_local().tolist())
    finally:
        dist.destroy_process_group()


def test_buffers_that_are_dtensors_are_restored(gloo: GlooPool) -> None:
    assert gloo.run(2, _divided_buffer) == [[1.0, 2.0]] * 2
