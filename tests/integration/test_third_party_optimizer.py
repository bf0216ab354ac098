"""A third-party optimizer with its own section: Muon for hidden matrices, AdamW for the rest. Its runs and updates are in
``test_example_suites.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.fake_cuda import FakeCuda
from titan_core.api import OptimizerSection
from titan_testing.gloo_pool import GlooPool

TINY: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 48}",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
    "optimizer.lr": 8e-4,
    "optimizer.name": "GatheredMuon",
    "gathered_muon.dtype": "float32",
    "job.device": "cpu",
}


@pytest.fixture(scope="module")
def site(site_of: Callable[[str], str]) -> str:
    return site_of("titan-optim-muon")


def skips(site: str) -> tuple[bool, bool]:
    """Return whether steps that are not skipped equal usual ones bit for bit, and whether a skipped one changes nothing."""
    sys.path.insert(0, site)
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    try:
        usual, conditional = Optimized(), Optimized()
        for value in (0.0, 1.0, 2.0):
            usual.backward(value)
            usual.optimizer.step()
            conditional.backward(value)
            conditional.optimizer.step_unless(torch.tensor(False))
        same = all(map(torch.equal, usual.tensors(), conditional.tensors()))
        conditional.backward(torch.nan)
        conditional.optimizer.step_unless(torch.tensor(True))
        return same, all(map(torch.equal, usual.tensors(), conditional.tensors()))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        sys.path.remove(site)


class Optimized:
    """A matrix and a vector, sharded if there are several ranks, and their optimizer."""

    def __init__(self) -> None:
        from titan_optim_muon.config import MuonSection
        from titan_optim_muon.muon import SkippableMuon

        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(size, generator=generator) for size in ((6, 4), (8,))]
        if torch.distributed.is_initialized():
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            values = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
        self.parameters = [nn.Parameter(value) for value in values]
        groups = [[{"params": [parameter], "lr": 0.1, "weight_decay": 0.1}] for parameter in self.parameters]
        self.optimizer: Any = SkippableMuon(*groups, MuonSection(), OptimizerSection())

    def backward(self, value: float) -> None:
        """Set gradients that depend on ``value``."""
        for parameter in self.parameters:
            parameter.grad = parameter.detach().cos() + value

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's parameters and states."""
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        found = [*self.parameters, *(tensor for state in states for tensor in state.values())]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_device_can_skip_a_step(gloo: GlooPool, site: str, ranks: int) -> None:
    assert gloo.run(ranks, skips, site) == [(True, True)] * ranks


def test_no_step_waits_for_the_device(fake_cuda: FakeCuda, site: str) -> None:
    """Whether the loss is finite, the host learns one step later."""
    settings = {key: value for key, value in TINY.items() if key != "job.device"}
    found = fake_cuda.train("tiny", {**settings, "metrics.log_freq": 100}, site=site)
    assert [wait for step in found.steps[1:3] for wait in step.waits] == []
