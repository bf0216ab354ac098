"""A third-party model that is neither all ``nn.Linear`` nor all attention. On meshes: ``test_example_suites.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import UserError
from titan_core.model.random_values import fill
from titan_testing.jobs import make_job
from titan_testing.meshes import CP, TP


@pytest.fixture
def package(site_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site_of("titan-model-hybrid"))


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
    args = "{dim = 32, recurrent_dim = 48, n_layers = 4, n_heads = 2, divide_sequences = false}"
    job = {"model.args": args, "training.seq_len": 48, "training.global_batch_size": -1, "job.device": "cpu"}
    make_job("hybrid", {**job, TP: 2}, 2)
    with pytest.raises(UserError, match=r"have kind 'linear_recurrence', and .* divides only 'causal_attention'") as caught:
        make_job("hybrid", {**job, CP: 2}, 2)
    assert len(caught.value.problems) == 1  # one problem per kind, not per block
