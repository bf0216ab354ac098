"""Schedule, parameter groups, gradient norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from titan_core.config.sections import LRSchedulerSection, OptimizerSection, ParamGroupSpec
from titan_core.errors import UserError
from titan_core.job.mesh_plan import MeshPlan
from titan_core.optim.adam import build_adam, build_adamw
from titan_core.optim.lr_schedule import build_wsd, wsd_factor
from titan_core.optim.param_groups import param_groups
from titan_core.train.grad_norm import clip_gradients, global_norm, local_gradients
from titan_core.train.world import World


def factors(steps: int, **section: Any) -> list[float]:
    return [wsd_factor(step, LRSchedulerSection(**section), steps) for step in range(steps)]


def test_warmup_rises_to_the_peak() -> None:
    assert factors(10, warmup_steps=4, decay_ratio=0.0) == [0.25, 0.5, 0.75, 1.0, 1, 1, 1, 1, 1, 1]


def test_linear_decay_would_reach_the_floor_one_step_after_the_last() -> None:
    assert factors(10, warmup_steps=0, decay_ratio=0.5)[5:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert factors(10, warmup_steps=0, decay_ratio=0.5, min_lr_factor=0.5)[5:] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6])


def test_without_a_ratio_decay_begins_after_the_warmup() -> None:
    assert factors(10, warmup_steps=5)[4:] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_shapes_of_decay() -> None:
    assert factors(5, warmup_steps=0, decay_ratio=0.8, decay_type="sqrt")[2:] == pytest.approx(
        [0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]
    )
    cosine = factors(101, warmup_steps=0, decay_ratio=1.0, decay_type="cosine")
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[51] == pytest.approx(0.5, abs=0.02)


def test_more_warmup_than_steps_is_all_warmup(caplog: pytest.LogCaptureFixture) -> None:
    assert factors(4, warmup_steps=8) == [0.25, 0.5, 0.75, 1.0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    build_wsd(optimizer, LRSchedulerSection(warmup_steps=8, decay_ratio=0.5), 10)
    build_wsd(optimizer, LRSchedulerSection(warmup_steps=8), 4)
    assert "decaying over 2" in caplog.text
    assert "training has 4 steps; warming up over all" in caplog.text


def module() -> nn.Module:
    return nn.ModuleDict({"norm": nn.LayerNorm(3), "linear": nn.Linear(3, 3)})


def test_norms_and_biases_do_not_decay_by_default() -> None:
    groups = param_groups(module().named_parameters(), OptimizerSection(lr=0.1, weight_decay=0.2))
    assert {name: group.weight_decay for group in groups for name in group.names} == {
        "norm.weight": 0.0, "norm.bias": 0.0, "linear.weight": 0.2, "linear.bias": 0.0,
    }  # fmt: skip


def test_the_first_pattern_that_matches_decides() -> None:
    section = OptimizerSection(
        lr=0.1,
        weight_decay=0.2,
        param_groups=[ParamGroupSpec(pattern="linear.*", lr_scale=0.5), ParamGroupSpec(pattern="*", weight_decay=0.0)],
    )
    groups = param_groups(module().named_parameters(), section)
    assert [(group.lr, group.weight_decay, group.names) for group in groups] == [
        (0.05, 0.2, ["linear.weight", "linear.bias"]),
        (0.1, 0.0, ["norm.weight", "norm.bias"]),
    ]


def test_a_model_without_parameters_to_train_is_refused() -> None:
    frozen = module().requires_grad_(False)
    with pytest.raises(UserError, match="no parameter to train"):
        param_groups(frozen.named_parameters(), OptimizerSection())


@pytest.mark.parametrize("implementation", ["auto", "for-loop", "foreach", "fused"])
@pytest.mark.parametrize("build", [build_adamw, build_adam])
def test_implementations_agree(implementation: str, build: Any) -> None:
    results = []
    for chosen in (implementation, "for-loop"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        section = OptimizerSection(lr=0.1, implementation=chosen)  # type: ignore[arg-type]
        optimizer = build(param_groups(model.named_parameters(), section), section)
        for _ in range(3):
            model(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)


def test_norm_and_clipping_are_torchs_on_one_device() -> None:
    world: Any = World(rank=0, device=torch.device("cpu"), plan=MeshPlan(dims=(), degrees={}), mesh=None)  # type: ignore[arg-type]
    parameters = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(2))]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn_like(parameter)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters[:2]]
    for copy, parameter in zip(copies, parameters, strict=False):
        assert parameter.grad is not None
        copy.grad = parameter.grad.clone()
    expected = nn.utils.clip_grad_norm_(copies, 0.5)
    gradients = local_gradients(parameters)
    norm = global_norm(gradients, world)
    clip_gradients(gradients, norm, 0.5)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for copy, parameter in zip(copies, parameters, strict=False):
        torch.testing.assert_close(parameter.grad, copy.grad)
