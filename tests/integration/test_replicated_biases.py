"""Replica groups balance experts by the same biases as one group alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.expert_biases import Biases, NotedBiases
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe

pytest.importorskip("titan_ft")
from harness.replicas import SHARED, Script, join_group, lighthouse, run_group

BALANCED: dict[str, object] = {
    "model.name": "qwen3_moe",
    "model.flavor": "debug",
    "model.args": (
        "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64, n_experts = 8, experts_per_token = 2,"
        ' expert_dim = 16, scoring = "sigmoid", choice_bias = true}'
    ),
    "training.steps": 3,
    "experts.balance": "bias",
    "experts.bias_rate": 0.01,
}


def in_a_group(address: str, folder: str) -> tuple[RunRecord, Biases]:
    os.chdir(folder)
    noted = NotedBiases("choice.bias")
    return run_group(address, join_group(1, []), (Script({0: 2}), noted), **BALANCED), noted.found


@pytest.mark.full
def test_two_groups_have_the_biases_of_one_to_the_bit(gloo: GlooPool, tmp_path: Path) -> None:
    alone = NotedBiases("choice.bias")
    record = run_recipe("tiny", {**SHARED, **BALANCED, "job.dump_folder": str(tmp_path / "alone")}, observers=[alone])
    with lighthouse() as address:
        groups = gloo.run(2, in_a_group, address, str(tmp_path))
    for of_group, biases in groups:
        assert of_group.losses == pytest.approx(record.losses, rel=1e-6)
        assert of_group.statistics == record.statistics
        assert biases.keys() == alone.found.keys() and len(biases) == 2
        for name, values in biases.items():
            assert values[-1].any()
            assert all(torch.equal(*pair) for pair in zip(values, alone.found[name], strict=True)), name
