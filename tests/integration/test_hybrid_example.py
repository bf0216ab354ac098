"""A third-party model that is neither all ``nn.Linear`` nor all attention, divided by its rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, make_job
from harness.third_party import install, train_with
from titan_core.api import UserError
from titan_core.model.random_values import fill

TP, CP, PP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "context", "pipeline"))
ARGS = "{dim = 32, recurrent_dim = 48, n_layers = 4, n_heads = 2, divide_sequences = %s}"
SMALL: dict[str, object] = {
    "model.args": ARGS % "true",
    "training.seq_len": 48,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 1,
}
DOCUMENTS = {"data.document_mask": "true"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hybrid")
    install(folder, "titan-model-hybrid")
    return str(folder)


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, site: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, RunRecord]:
    """Train on one device; the key is whether documents are masked."""
    folder = str(tmp_path_factory.mktemp("one"))
    kinds: dict[bool, dict[str, object]] = {False: SMALL, True: {**SMALL, **DOCUMENTS}}
    return {masked: gloo.run(1, train_with, site, folder, "hybrid", kind)[0][0] for masked, kind in kinds.items()}


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        pytest.param(2, {}, marks=pytest.mark.full),
        (2, {TP: 2}),
        pytest.param(2, {PP: 2}, marks=pytest.mark.full),
        pytest.param(2, {CP: 2}, marks=pytest.mark.full),
        pytest.param(2, {TP: 2, **DOCUMENTS}, marks=pytest.mark.full),
        (2, {CP: 2, **DOCUMENTS}),
        pytest.param(4, {TP: 2, CP: 2}, marks=pytest.mark.long),
        pytest.param(4, {TP: 2, "activation_checkpoint.mode": "selective"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_hybrid_trains_as_on_one_device(
    gloo: GlooPool, site: str, one_device: dict[bool, RunRecord], tmp_path: Path, ranks: int, degrees: dict[str, object]
) -> None:
    one = one_device["data.document_mask" in degrees]
    for record, _ in gloo.run(ranks, train_with, site, str(tmp_path), "hybrid", {**SMALL, **degrees}):
        assert record.losses == pytest.approx(one.losses, rel=2e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


@pytest.fixture
def package(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("package")
def test_the_model_is_a_recurrence_step_by_step() -> None:
    """The parallel scan gives the same result as a loop over positions."""
    from titan_model_hybrid.config import HybridArgs
    from titan_model_hybrid.model import Hybrid

    torch.manual_seed(0)
    model: Any = Hybrid(HybridArgs(dim=16, recurrent_dim=24, n_layers=1, n_heads=2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens, documents = torch.randint(288, (2, 9)), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    block = model.blocks[0]
    recurrence, hidden = block.mixing, model.embedding(tokens)
    x = block.norm1(hidden)
    inputs, gate = x @ recurrence.input.weight.T, F.gelu(x @ recurrence.gate.weight.T)
    state, states = torch.zeros(2, 24), []
    for position in range(9):
        here = inputs[:, position]
        keep, take = (torch.sigmoid(here * recurrence.gates.weight[i] + recurrence.gates.bias[i]) for i in (0, 1))
        decay = torch.exp(-8 * keep * F.softplus(recurrence.gates.rate))
        if position:
            state = state * (documents[:, position] == documents[:, position - 1])[:, None]
        state = decay * state + torch.sqrt(1 - decay**2) * take * here
        states.append(state)
    hidden = hidden + (gate * torch.stack(states, 1)) @ recurrence.output.weight.T
    hidden = hidden + block.mlp(block.norm2(hidden))
    expected: Tensor = model.unembedding(model.norm(hidden))
    torch.testing.assert_close(model(tokens, None, documents), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("package")
def test_the_initial_decay_of_an_open_gate_is_uniform() -> None:
    from titan_model_hybrid.config import HybridArgs
    from titan_model_hybrid.layout import layout

    value = layout(HybridArgs()).initial_value("blocks.0.mixing.gates.rate")
    assert value is not None
    rate = torch.empty(20_000)
    fill(rate, value, seed=0, name="blocks.0.mixing.gates.rate", global_shape=rate.shape, offset=(0,))
    decay = torch.exp(-8.0 * F.softplus(rate)).sort().values
    torch.testing.assert_close(decay, torch.linspace(0.9, 0.999, 20_000), rtol=0.0, atol=2e-3)


@pytest.mark.usefixtures("package")
def test_a_kind_without_a_rule_is_refused_before_anything_is_divided() -> None:
    job = {**SMALL, "model.args": ARGS % "false", "job.device": "cpu"}
    make_job("hybrid", {**job, TP: 2}, 2)
    with pytest.raises(
        UserError, match="have kind 'linear_recurrence', and context parallelism divides only 'causal_attention'"
    ) as caught:
        make_job("hybrid", {**job, CP: 2}, 2)
    assert len(caught.value.problems) == 1  # one problem per kind, not per block
