"""In bf16, routers choose the experts that they choose on one device, because they compute in fp32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_core.api import hookimpl
from titan_nn.experts import ExpertChoice
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe
from titan_testing.meshes import FAST

ARGS = (
    "{dim = 64, n_layers = 3, n_heads = 4, n_kv_heads = 2, ffn_dim = 96, n_experts = 16, experts_per_token = 4,"
    ' expert_dim = 32, n_shared_experts = 1, scoring = "sigmoid", choice_bias = true}'
)
SETTINGS: dict[str, object] = {
    **FAST,
    "model.args": ARGS,
    "training.steps": 1,
    "training.seq_len": 128,
    "training.local_batch_size": 4,
    "training.global_batch_size": 16,
    "training.mixed_precision_param": "bfloat16",
}
EP = "parallelism.expert_parallel_degree"
Choices = dict[tuple[Any, ...], Tensor]
"""(ids of a sequence, router) -> the experts of each position, in ascending order."""


class Chosen:
    """Records what routers choose in the first step, and the type that they compute in."""

    def __init__(self) -> None:
        self.found: Choices = {}
        self.types: set[torch.dtype] = set()
        self._ids = torch.empty(0)

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        for part in run.parts:
            part.module.register_forward_pre_hook(self._called)
            for name, module in part.named_modules():
                if isinstance(module, ExpertChoice):
                    module.register_forward_hook(lambda _, given, chosen, name=name: self._chosen(name, given[0], chosen))
                if name.endswith("feed_forward.experts"):
                    module.register_forward_pre_hook(lambda _, given: self.types.add(given[0].dtype))

    def _called(self, module: Any, given: tuple[Tensor, ...]) -> None:
        self._ids = given[0]

    def _chosen(self, name: str, scores: Tensor, chosen: Tensor) -> None:
        assert scores.dtype == torch.float32
        for ids, of_sequence in zip(self._ids, chosen.unflatten(0, self._ids.shape), strict=True):
            self.found[tuple(ids.tolist()), name] = of_sequence.sort(-1).values


def chosen_in(folder: str, overrides: dict[str, object]) -> tuple[Choices, set[torch.dtype]]:
    os.chdir(folder)
    observer = Chosen()
    run_recipe("qwen3_moe_tiny", {**SETTINGS, **overrides}, observers=[observer])
    return observer.found, observer.types


@pytest.mark.full
def test_999_of_1000_tokens_pass_through_the_experts_of_one_device(gloo: GlooPool, tmp_path: Path) -> None:
    ((one, types),) = gloo.run(1, chosen_in, str(tmp_path), {})
    assert types == {torch.bfloat16}
    found: Choices = {}
    for choices, _ in gloo.run(4, chosen_in, str(tmp_path), {EP: 2}):
        found |= choices
    assert found.keys() == one.keys() and len({ids for ids, _ in one}) == 16
    same = torch.stack([(found[key] == one[key]).all(-1) for key in one])
    assert same.numel() == 16 * 3 * 128
    assert same.float().mean() >= 0.999
