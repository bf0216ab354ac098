"""The z-loss of routers is that of the formula, with its gradients, and needs routers whose logits can be reached. Biases
are those that the layout names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.model_trials import require
from harness.small_gpt import DIM, LAYOUT, SmallGPT, definition
from titan_core.api import Batch, ModelDefinition, Replicate, Router, UserError, current_microbatch, hookimpl
from titan_nn.experts import ExpertChoice
from titan_testing.jobs import make_job, run_job

EXPERTS, PER_TOKEN, WEIGHT = 4, 2, 0.5
ROUTED = replace(
    LAYOUT,
    rules={
        **{pattern: rule for pattern, rule in LAYOUT.rules.items() if ".mlp." not in pattern},
        "blocks.*.mlp.*": Replicate(),
    },
    regions=("blocks.*.attention",),
    routers={"blocks.*.mlp.router": Router(experts=EXPERTS, per_token=PER_TOKEN)},
)
SETTINGS: dict[str, object] = {
    "experts.z_loss_weight": WEIGHT,
    "training.seq_len": 16,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 1,
    "job.device": "cpu",
}

Job = Callable[..., Any]


class TokenRouter(nn.Module):
    """A router with one change: ``logits`` is absent, is not called, or is called in vain."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.empty(EXPERTS, DIM))
        self.choice = ExpertChoice(EXPERTS, PER_TOKEN)
        if change != "absent":
            self.logits = nn.Identity()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = 5 * F.linear(tokens, self.weight)
        if self.change == "in vain":
            self.logits(logits)
        elif self.change == "wrong size":
            self.logits(logits.T)
        elif self.change == "":
            logits = self.logits(logits)
        scores = logits.softmax(-1)
        chosen = self.choice(scores)
        return scores.gather(1, chosen), chosen, scores


class Experts(nn.Module):
    """Each expert multiplies features by its own factors."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.router, self.factors = TokenRouter(change), nn.Parameter(torch.empty(EXPERTS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen, _ = self.router(x.flatten(0, 1))
        return x * (weights[..., None] * self.factors[chosen]).sum(1).view_as(x)


def routed(change: str = "") -> SmallGPT:
    model = SmallGPT()
    for block in model.blocks:
        block.mlp = Experts(change)
    return model


@pytest.fixture
def job(in_tmp: object, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a function that makes a job that trains a model."""

    def made(model: ModelDefinition, weight: float = WEIGHT, balance: str = "none") -> Any:
        monkeypatch.setattr("titan_testing.tiny.define", lambda args: model)
        return make_job("tiny", {**SETTINGS, "experts.z_loss_weight": weight, "experts.balance": balance}, 1)

    return made


class Batches:
    """Keeps the batches that the model is called with."""

    def __init__(self) -> None:
        self.found: list[Batch] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        run.parts[0].module.register_forward_pre_hook(lambda *_: self.found.append(current_microbatch().batch))


def test_the_loss_and_its_gradients_are_those_of_the_formula(job: Job) -> None:
    """Of two microbatches, which are one batch here."""
    batches = Batches()
    record = run_job(job(definition(routed, ROUTED)), weights=True, observers=[batches])
    assert len(batches.found) == 2
    tokens, targets = (torch.cat([getattr(batch, name) for batch in batches.found]) for name in ("tokens", "targets"))
    model, logits = routed(), list[Tensor]()
    model.load_state_dict(record.initial)
    for block in model.blocks:
        block.mlp.router.logits.register_forward_hook(lambda module, inputs, output: logits.append(output))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    penalty = WEIGHT * sum(torch.log(one.exp().sum(1)).pow(2).mean() for one in logits)
    plain = torch.autograd.grad(loss, tuple(model.parameters()), retain_graph=True)
    (loss + penalty).backward()
    assert record.losses == [pytest.approx(loss.item(), rel=1e-6)]
    assert record.auxiliary == [{"router_z_loss": pytest.approx(penalty.item(), rel=1e-6)}]
    for (name, parameter), alone in zip(model.named_parameters(), plain, strict=True):
        # Those of the biases of keys are zero, except for rounding.
        assert (record.gradients[name] - parameter.grad).norm() <= 1e-6 * max(parameter.grad.norm().item(), 0.1), name
        if "router" in name:
            assert (parameter.grad - alone).norm() > 0.1 * alone.norm(), name


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("absent", "router 'blocks.0.mlp.router' has no module `logits` that it calls"),
        ("not called", "router 'blocks.0.mlp.router' has no module `logits` that it calls"),
        ("in vain", "router 'blocks.0.mlp.router' does not use what its module `logits` returns"),
        ("wrong size", r"router 'blocks.0.mlp.router' calls its module `logits` with the shapes \[\(4, \d+\)\]"),
    ],
)
def test_logits_that_cannot_be_reached_are_refused(job: Job, change: str, why: str) -> None:
    model = definition(lambda: routed(change), ROUTED)
    with pytest.raises(UserError, match=why) as error:
        require(job(model))
    assert "experts.z_loss_weight" in str(error.value)
    require(job(model, 0.0))


def test_a_model_without_routers_is_refused(job: Job) -> None:
    with pytest.raises(UserError, match=r"experts\.z_loss_weight.*its layout names no routers; set it to 0\.0"):
        job(definition())


class Offset(nn.Module):
    """A choice with a bias of a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(EXPERTS))

    def forward(self, scores: Tensor) -> Tensor:
        return (scores.detach() + self.offset).topk(PER_TOKEN).indices


def biased() -> SmallGPT:
    model = routed()
    for block in model.blocks:
        block.mlp.router.choice = Offset()
    return model


def named(bias: str | None) -> ModelDefinition:
    """Return a model whose layout names a bias of its routers, which have ``choice.offset``."""
    router = Router(experts=EXPERTS, per_token=PER_TOKEN, bias=bias)
    values = {"blocks.*.mlp.router.choice.offset": lambda: torch.zeros(EXPERTS)}
    return definition(biased, replace(ROUTED, routers={"blocks.*.mlp.router": router}, buffers={**ROUTED.buffers, **values}))


class Offsets:
    """Keeps the biases at the end of the run."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.found += [buffer for name, buffer in run.parts[0].module.named_buffers() if name.endswith("offset")]


def test_the_bias_that_the_layout_names_balances(job: Job) -> None:
    record = run_job(job(named("choice.offset"), 0.0, "bias"), observers=[offsets := Offsets()])
    assert len(offsets.found) == len(record.statistics[0]["experts_rows"])
    for bias, rows in zip(offsets.found, record.statistics[0]["experts_rows"], strict=True):
        loads = torch.tensor(rows).double()
        assert torch.equal(bias, 0.001 * torch.sign(loads.mean() - loads).float())
        assert bias.any()


@pytest.mark.parametrize(
    ("bias", "why"),
    [
        (None, "has no bias of the choice of experts that training may change and that its weight files hold"),
        ("choice.bias", r"router 'blocks\.0\.mlp\.router' has no bias: it has no buffer 'choice\.bias'"),
    ],
)
def test_routers_without_a_bias_are_not_balanced_by_one(job: Job, bias: str | None, why: str) -> None:
    with pytest.raises(UserError, match=rf"experts\.balance.*{why}"):
        require(job(named(bias), 0.0, "bias"))
