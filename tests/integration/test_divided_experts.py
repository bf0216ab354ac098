"""Tensor parallelism may divide experts whose products are in MXFP8, between blocks: they train as on one device."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import small_gpt
from harness.small_gpt import DIM, LAYOUT, SmallGPT
from titan_core.api import Experts, Normal, Shard
from titan_nn.experts import GroupedLinear, combine, permute_to_experts
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_job

TP = "parallelism.tensor_parallel_degree"
EXPERTS, SIDE = 2, 64
BRIEF: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, n_experts = 2}",
    "training.steps": 3,
    "training.seq_len": 16,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 1,
    "job.device": "cpu",
    "plugins.disable": '["experts"]',  # the model has no router that a transform could balance
}
MX: dict[str, object] = {
    "mx.enable": "true",
    "mx.emulate": "true",
    "mx.recipe_name": "mxfp8_rceil_wgrad_with_hp",
    "mx.convert_experts": "true",
}
LAYOUT_OF_EXPERTS = replace(
    LAYOUT,
    rules={
        **{pattern: rule for pattern, rule in LAYOUT.rules.items() if ".mlp." not in pattern},
        "blocks.*.mlp.experts.up": Experts(within=Shard(1)),
        "blocks.*.mlp.experts.down": Experts(within=Shard(2)),
    },
    sums=("blocks.*.mlp",),
    parameters={**LAYOUT.parameters, "*": Normal(0.1)},
)


class StackedExperts(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(EXPERTS, inner, SIDE)), nn.Parameter(torch.empty(EXPERTS, SIDE, inner))
        self.product = GroupedLinear()

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.product(F.silu(self.product(rows, self.up, counts)), self.down, counts)


class ExpertBySign(nn.Module):
    """Sends tokens whose first feature is positive to one expert, and the others to the other."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.experts = StackedExperts(inner)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen = (tokens[:, :1] > 0).long()
        rows, counts, places = permute_to_experts(F.pad(tokens, (0, SIDE - DIM)), chosen, EXPERTS)
        weights = torch.ones(chosen.shape, device=x.device)
        return combine(self.experts(rows, counts), weights, places)[:, :DIM].view_as(x)


def with_experts(inner: int) -> SmallGPT:
    model = SmallGPT()
    for block in model.blocks:
        block.mlp = ExpertBySign(inner)
    return model


def train(folder: str, inner: int, overrides: dict[str, object]) -> RunRecord:
    os.chdir(folder)
    model = small_gpt.definition(lambda: with_experts(inner), LAYOUT_OF_EXPERTS)
    job = make_job("qwen3_moe_tiny", {**BRIEF, **overrides}, int(os.environ["WORLD_SIZE"]))
    return run_job(replace(job, model=model), weights=True)


@pytest.mark.full
def test_ranks_that_divide_experts_scale_the_same_blocks(gloo: GlooPool, tmp_path: Path) -> None:
    one, high = (gloo.run(1, train, str(tmp_path), 64, keys)[0] for keys in (MX, {}))
    assert one.losses != pytest.approx(high.losses, rel=1e-6)
    records = gloo.run(2, train, str(tmp_path), 64, {**MX, TP: 2})
    gradients = {key: value for record in records for key, value in record.gradients.items()}
    assert set(gradients) == set(one.gradients)
    for record in records:
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
    total = sum(float(gradient.norm()) for gradient in one.gradients.values())  # that of a key's bias is 0
    for key, gradient in gradients.items():
        norm = float(one.gradients[key].norm()) if ".experts." in key else total
        assert float((gradient - one.gradients[key]).norm()) <= 1e-5 * norm, key


@pytest.mark.full
def test_ranks_that_would_cut_through_blocks_are_refused(gloo: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="of 32 x tensor_parallel_degree = 64 where tensor parallelism divides it"):
        gloo.run(2, train, str(tmp_path), 96, {**MX, TP: 2})
