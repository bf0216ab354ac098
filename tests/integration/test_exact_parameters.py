"""Checkpoints hold parameters that compute in fp32 like all others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.small_gpt import small, train_model


def train(folder: str, overrides: dict[str, object]) -> RunRecord:
    brief = {"training.steps": 2, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
    brief |= {"training.mixed_precision_param": "bfloat16", "checkpoint.enable": "true", "checkpoint.interval": 1}
    return train_model(folder, small(gains=True), {**brief, "job.dump_folder": "run", **overrides})


@pytest.mark.full
def test_they_resume_on_another_mesh(gloo: GlooPool, tmp_path: Path) -> None:
    stopped, _ = gloo.run(2, train, str(tmp_path), {"training.stop_at_step": 1})
    (resumed,) = gloo.run(1, train, str(tmp_path), {})
    assert stopped.final.keys() == resumed.initial.keys()
    for name, tensor in stopped.final.items():
        assert tensor.dtype == torch.float32 and torch.equal(resumed.initial[name], tensor), name
