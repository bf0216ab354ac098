"""One real rank of a job of many, on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.on_device import BF16, SMALL
from titan_core.loop.training import train
from titan_simulate.engine.real_rank import SETTINGS, WARM_UP, measure_rank
from titan_testing.jobs import make_job

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(8, BF16), (4, {"parallelism.tensor_parallel_degree": 2}), (2, {"training.disable_cuda_graphs": "false"})],
    ids=["FSDP", "TP", "CUDA graphs"],
)
def test_a_rank_is_measured(device: torch.device, in_tmp: Path, ranks: int, overrides: dict[str, object]) -> None:
    steps = {"training.steps": WARM_UP + 3, "training.global_batch_size": -1, "job.device": device.type}
    found = measure_rank(make_job("tiny", {**SMALL, **SETTINGS, **steps, **overrides}, ranks), train, ranks - 1, 2)
    assert found.step_seconds > 0 and found.memory.peak_gib > 0
    assert (found.memory.reserved_gib is None) == (device.type == "cpu")
