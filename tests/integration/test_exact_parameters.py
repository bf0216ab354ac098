"""Checkpoints hold parameters that compute in fp32 like all others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.gained_gpt import BFLOAT16, train
from harness.gloo_pool import GlooPool


@pytest.mark.full
def test_they_resume_on_another_mesh(gloo: GlooPool, tmp_path: Path) -> None:
    saved = {**BFLOAT16, "checkpoint.enable": "true", "checkpoint.interval": 1, "job.dump_folder": "run"}
    (stopped, _), _ = gloo.run(2, train, str(tmp_path), {**saved, "training.stop_at_step": 1})
    ((resumed, _),) = gloo.run(1, train, str(tmp_path), saved)
    assert stopped.final.keys() == resumed.initial.keys()
    for name, tensor in stopped.final.items():
        assert tensor.dtype == torch.float32 and torch.equal(resumed.initial[name], tensor), name
