"""Learning-rate schedule, parameter groups, optimizers and gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.contexts import grouped, optimizer_context, schedule_context
from harness.small_gpt import LAYOUT, SmallGPT
from titan_core.api import MeshPlan, ModelPart, OptimizerSection, ParamGroup, UserError, World
from titan_core.api.config.sections import LRSchedulerSection, ParamGroupSpec
from titan_core.api.training.optimizer import param_groups, trained_parameters
from titan_core.loop.optimizer_step import clip_gradients, global_norm, local_gradients
from titan_core.model.freeze import require_trained
from titan_core.model.next_token import NextToken
from titan_core.optim.adam import build_adam, build_adamw
from titan_core.optim.lr_schedule import build_wsd, wsd_factor
from titan_core.plugin import titan_optimizers
from titan_testing.gloo_pool import GlooPool


def test_more_warmup_than_steps_is_all_warmup(caplog: pytest.LogCaptureFixture) -> None:
    section = LRSchedulerSection(warmup_steps=8)
    assert [wsd_factor(step, section, 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    build_wsd(schedule_context(optimizer, LRSchedulerSection(warmup_steps=8, decay_ratio=0.5), 10))
    build_wsd(schedule_context(optimizer, section, 4))
    assert "decaying over 2" in caplog.text
    assert "training has only 4 steps; warming up over all" in caplog.text


DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "sqrt": lambda left: 1 - math.sqrt(1 - left),
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
}


@pytest.mark.parametrize("decay_type", DECAYS)
@pytest.mark.parametrize(
    ("warmup", "decay", "floor"), [(0, 0, 0.0), (3, 4, 0.0), (1, 11, 0.25), (5, None, 0.5), (12, 0, 0.0)]
)
def test_every_step_has_the_learning_rate_of_its_phase(
    decay_type: Any, warmup: int, decay: int | None, floor: float
) -> None:
    """Warmup starts at a fraction of the peak and ends at the peak. Decay starts at the peak and would reach the floor one
    step after training. Without a ratio, it starts after warmup."""
    steps = 12
    ratio = None if decay is None else decay / steps
    section = LRSchedulerSection(warmup_steps=warmup, decay_ratio=ratio, decay_type=decay_type, min_lr_factor=floor)
    decay = steps - warmup if decay is None else decay
    expected = [(step + 1) / warmup for step in range(warmup)] + [1.0] * (steps - warmup - decay)
    for left in range(decay, 0, -1):  # remaining steps, including this one
        expected.append(floor + (1 - floor) * DECAYS[decay_type](left / decay))
    assert [wsd_factor(step, section, steps) for step in range(steps)] == pytest.approx(expected)
    if decay:
        assert wsd_factor(steps, section, steps) == pytest.approx(floor)
        assert wsd_factor(steps + 3, section, steps) == pytest.approx(floor)


def test_each_optimizer_step_uses_its_own_learning_rate() -> None:
    """It is not the rate of the step before or after, and is scaled by the rate of each group."""
    section = LRSchedulerSection(warmup_steps=2, decay_ratio=0.5)
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.4, 0.1)])
    schedule = build_wsd(schedule_context(optimizer, section, 6))
    taken = []
    for _ in range(6):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(1)
        before = [float(group["params"][0].detach()) for group in optimizer.param_groups]
        optimizer.step()
        after = [float(group["params"][0].detach()) for group in optimizer.param_groups]
        taken.append([old - new for old, new in zip(before, after, strict=True)])
        schedule.step()
    expected = [0.5, 1.0, 1.0, 1.0, 2 / 3, 1 / 3]
    assert taken == [pytest.approx([0.4 * factor, 0.1 * factor], abs=1e-6) for factor in expected]


def module() -> nn.Module:
    return nn.ModuleDict({"norm": nn.LayerNorm(3), "linear": nn.Linear(3, 3)})


class Varied(nn.Module):
    """Parameters with 0 to 3 dimensions, under uninformative names."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(3)
        self.renormalise = nn.Linear(3, 3)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.scale = nn.Parameter(torch.ones(3))
        self.experts = nn.Parameter(torch.ones(4, 3, 3))
        self.experts_bias = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.renormalise(self.ln_1(x)) * self.scale * self.temperature
        return (y @ self.experts + self.experts_bias[:, None]).sum()


DECAYED = {"renormalise.weight", "experts"}
NOT_DECAYED = {"ln_1.weight", "ln_1.bias", "renormalise.bias", "temperature", "scale", "experts_bias"}


def names(group: ParamGroup) -> list[str]:
    return [parameter.name for parameter in group.parameters]


def decay_by_name(groups: Sequence[ParamGroup]) -> dict[str, float]:
    return {name: group.weight_decay for group in groups for name in names(group)}


def test_vectors_scalars_and_biases_do_not_decay_by_default() -> None:
    groups = grouped(Varied().named_parameters(), OptimizerSection(lr=0.1, weight_decay=0.2))
    assert decay_by_name(groups) == {**dict.fromkeys(DECAYED, 0.2), **dict.fromkeys(NOT_DECAYED, 0.0)}
    assert [group.as_dict(0.1)["lr"] for group in groups] == [0.1, 0.1]


OPTIMIZERS = {optimizer.name: optimizer.build.load() for optimizer in titan_optimizers()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_empty_param_groups_decays_everything_like_torch_and_torchtitan(name: str) -> None:
    """With ``optimizer.param_groups = []``. All other settings match those of torch's optimizer of this name."""
    build, cls = OPTIMIZERS[name], getattr(torch.optim, name)
    section = OptimizerSection(lr=0.05, beta1=0.7, beta2=0.99, eps=1e-3, weight_decay=0.3, param_groups=[])
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = Varied()
        optimizer = (
            build(optimizer_context(model.named_parameters(), section))
            if ours
            else cls(model.parameters(), lr=0.05, betas=(0.7, 0.99), eps=1e-3, weight_decay=0.3, foreach=False)
        )
        assert isinstance(optimizer, cls) and len(optimizer.param_groups) == 1
        for step in range(4):
            model(torch.full((2, 3), 1.0 + step).cumsum(0).cumsum(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("implementation", ["auto", "for-loop", "foreach", "fused"])
@pytest.mark.parametrize("build", [build_adamw, build_adam])
def test_a_step_follows_the_papers(build: Any, implementation: Any) -> None:
    """Compare with the formulas in double precision, for each setting and group."""
    section = OptimizerSection(lr=0.05, beta1=0.6, beta2=0.95, eps=1e-2, weight_decay=0.3, implementation=implementation)
    matrix, gain = nn.Parameter(torch.tensor([[0.5, -2.0]])), nn.Parameter(torch.tensor([1.5]))
    optimizer = build(optimizer_context([("w", matrix), ("g", gain)], section))
    expected = {"w": matrix.detach().double(), "g": gain.detach().double()}
    means = {name: (torch.zeros(1).double(), torch.zeros(1).double()) for name in expected}
    for step in range(1, 5):
        for name, parameter in (("w", matrix), ("g", gain)):
            parameter.grad = torch.full_like(parameter, 0.1 * step) * parameter.detach().sign()
            gradient, decay = parameter.grad.double(), 0.3 if name == "w" else 0.0
            value = expected[name]
            if build is build_adamw:
                value = value * (1 - 0.05 * decay)
            else:
                gradient = gradient + decay * value
            first = 0.6 * means[name][0] + 0.4 * gradient
            second = 0.95 * means[name][1] + 0.05 * gradient**2
            means[name] = (first, second)
            change = (first / (1 - 0.6**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-2)
            expected[name] = value - 0.05 * change
        optimizer.step()
    torch.testing.assert_close(matrix.detach().double(), expected["w"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gain.detach().double(), expected["g"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("implementation", "fused", "foreach"),
    [("auto", True, False), ("fused", True, False), ("foreach", False, True), ("for-loop", False, False)],
)
def test_the_requested_implementation_is_used(implementation: Any, fused: bool, foreach: bool) -> None:
    section = OptimizerSection(implementation=implementation)
    optimizer = build_adamw(optimizer_context(module().named_parameters(), section))
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (fused, foreach)


def test_patterns_affect_only_matching_parameters() -> None:
    section = OptimizerSection(lr=0.1, weight_decay=0.2, param_groups=[ParamGroupSpec(pattern="norm*", weight_decay=0.0)])
    model = module()
    optimizer = build_adamw(optimizer_context(model.named_parameters(), section))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (1.0 if "norm" in name else 1 - 0.1 * 0.2))


def test_the_first_matching_pattern_applies() -> None:
    section = OptimizerSection(
        lr=0.1,
        weight_decay=0.2,
        param_groups=[ParamGroupSpec(pattern="linear.*", lr_scale=0.5), ParamGroupSpec(pattern="*", weight_decay=0.0)],
    )
    groups = grouped(module().named_parameters(), section)
    assert [(group.as_dict(section.lr)["lr"], group.weight_decay, names(group)) for group in groups] == [
        (0.05, 0.2, ["linear.weight", "linear.bias"]),
        (0.1, 0.0, ["norm.weight", "norm.bias"]),
    ]


def part_of(module: nn.Module) -> ModelPart:
    return ModelPart(module, LAYOUT, NextToken())


def test_a_model_without_parameters_to_train_is_refused() -> None:
    frozen = SmallGPT().requires_grad_(False)
    with pytest.raises(UserError, match="no parameter to train"):
        require_trained(frozen)


def test_a_rank_without_parameters_to_train_has_one_empty_group() -> None:
    """Torch's optimizers refuse to have none."""
    frozen = trained_parameters([part_of(SmallGPT().requires_grad_(False))])
    (group,) = param_groups(frozen, OptimizerSection(lr=0.5, param_groups=[ParamGroupSpec(pattern="*")]))
    assert (group.parameters, group.lr_scale) == ([], 1.0)
    torch.optim.AdamW([group.as_dict(0.5)]).step()


def test_frozen_parameters_are_omitted() -> None:
    model = SmallGPT()
    model.embedding.requires_grad_(False)
    assert not any(parameter.name.startswith("embedding.") for parameter in trained_parameters([part_of(model)]))


class WithExperts(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts = nn.Parameter(torch.zeros(2, 3, 5))
        self.blocks[0].experts_bias = nn.Parameter(torch.zeros(2, 5))
        self.output.bias = nn.Parameter(torch.zeros(288))


def roles(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    parameters = trained_parameters([part_of(model)])
    return {parameter.name: (parameter.role.value, tuple(parameter.shape)) for parameter in parameters}


def test_each_parameter_has_a_role_by_layout_and_shape() -> None:
    found = roles(WithExperts())
    assert found["embedding.token.weight"] == ("embedding", (288, 24))
    assert found["embedding.position.weight"] == ("embedding", (64, 24))
    assert found["blocks.0.attention.q.weight"] == ("hidden matrix", (24, 24))
    assert found["blocks.1.mlp.up.weight"] == ("hidden matrix", (48, 24))
    assert found["blocks.0.experts"] == ("hidden stack", (2, 3, 5))
    assert found["output.weight"] == ("head", (288, 24))
    vectors = ("blocks.0.mlp.up.bias", "blocks.0.norms.0.weight", "norm.weight", "output.bias", "blocks.0.experts_bias")
    assert {found[name][0] for name in vectors} == {"vector"}
    assert found.keys() == dict(WithExperts().named_parameters()).keys()


def divided() -> tuple[dict[str, float], list[int], dict[str, tuple[str, tuple[int, ...]]]]:
    """Under FSDP: return the decay by name, the shape of this rank's shard of the stacked experts, and roles and shapes."""
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model, whole = Varied(), WithExperts()
        fully_shard(model, mesh=mesh, ignored_params={model.temperature})  # FSDP does not shard scalars
        groups = grouped(model.named_parameters(), OptimizerSection(lr=0.1, weight_decay=0.2))
        for block in whole.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        return decay_by_name(groups), list(model.experts.to_local().shape), roles(whole)  # type: ignore[operator]
    finally:
        dist.destroy_process_group()


def test_decay_roles_and_shapes_do_not_depend_on_sharding(gloo: GlooPool) -> None:
    decay = {**dict.fromkeys(DECAYED, 0.2), **dict.fromkeys(NOT_DECAYED, 0.0)}
    assert gloo.run(2, divided) == [(decay, [2, 3, 3], roles(WithExperts()))] * 2


def test_norm_and_clipping_equal_torchs_on_one_device() -> None:
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
