"""Steps of models with experts, auxiliary losses and statistics, recorded and repeated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.fake_cuda import FakeCuda
from harness.taped_step import taped_graphs
from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe
from titan_testing.meshes import FAST

GRAPHS: dict[str, object] = {"training.disable_cuda_graphs": "false"}
STEPS: dict[str, object] = {**FAST, "training.steps": 5, "job.device": "cpu"}
EP = "parallelism.expert_parallel_degree"
ON_DEVICE: dict[str, object] = {EP: 2, "parallelism.expert_parallel_dispatch": "device"}
JOBS: dict[str, tuple[int, dict[str, object]]] = {
    "losses of sequences": (1, {"experts.balance": "sequence", "experts.z_loss_weight": 0.01}),
    "loads of the step before": (1, {"experts.balance": "global"}),
    "experts on two ranks": (2, ON_DEVICE),
}


def both(folder: str, overrides: dict[str, object]) -> tuple[RunRecord, RunRecord]:
    """Return the records of a run with graphs and of one without."""
    os.chdir(folder)
    with taped_graphs():
        graphed = run_recipe("qwen3_moe_tiny", {**STEPS, **overrides, **GRAPHS}, weights=True)
    return graphed, run_recipe("qwen3_moe_tiny", {**STEPS, **overrides}, weights=True)


@pytest.mark.parametrize("job", JOBS)
def test_repeated_steps_count_as_steps_that_run_anew(gloo: GlooPool, tmp_path: Path, job: str) -> None:
    ranks, overrides = JOBS[job]
    for graphed, plain in gloo.run(ranks, both, str(tmp_path), overrides):
        assert graphed.losses == plain.losses
        assert graphed.auxiliary == plain.auxiliary
        assert graphed.statistics == plain.statistics and plain.statistics[0]
        for name, tensor in plain.final.items():
            assert torch.equal(graphed.final[name], tensor), name


def test_experts_for_whose_rows_the_host_waits_are_refused(in_tmp: Path, fake_cuda: FakeCuda) -> None:
    with pytest.raises(UserError, match="expert_parallel makes the host wait for the device within a step"):
        fake_cuda.train("qwen3_moe_tiny", {**FAST, **GRAPHS, EP: 2}, world_size=2)


def test_scales_that_move_after_each_update_are_refused(fake_cuda: FakeCuda) -> None:
    scales: dict[str, object] = {
        "float8.enable": "true",
        "job.device": "cuda",
        "float8.enable_fsdp_float8_all_gather": "true",
        "float8.precompute_float8_dynamic_scale_for_fsdp": "true",
        "training.mixed_precision_param": "bfloat16",
    }
    with pytest.raises(UserError, match="computes something from the weights after each update"):
        fake_cuda.train("tiny", {**FAST, **GRAPHS, **scales}, world_size=2)
