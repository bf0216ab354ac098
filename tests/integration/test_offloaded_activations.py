"""Activations in host memory, of models whose experts and low precision are other packages'."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from harness.quick import rows
from titan_parallel.host_memory import Stored
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe
from titan_testing.meshes import TINY

SHARE, MODE = "activation_checkpoint.offload_share", "activation_checkpoint.mode"
EP, TP, PP = (f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor", "pipeline"))
SHORT: dict[str, object] = {
    "training.steps": 2, "lr_scheduler.warmup_steps": 1, "training.seq_len": 32, "training.local_batch_size": 2,
    "training.global_batch_size": 8, "job.device": "cpu",
}  # fmt: skip
EXPERTS: dict[str, object] = {"model.args": "{dim = 64, expert_dim = 48, n_experts = 2}"}
FLOAT8: dict[str, object] = {**TINY, "model.args": "{dim = 64, n_layers = 4, ffn_dim = 96}", "float8.emulate": "true"}
ROWWISE: dict[str, object] = {"float8.enable": "true", "float8.recipe_name": "rowwise"}
GATHERED: dict[str, object] = {"float8.enable": "true", "float8.enable_fsdp_float8_all_gather": "true"}
JOBS: dict[str, tuple[int, str, dict[str, object]]] = {
    "EP 2": (2, "moe", {EP: 2}),
    "EP 2, selective": (2, "moe", {EP: 2, MODE: "selective"}),
    "EP 2 x TP 2, full": (4, "moe", {EP: 2, TP: 2, MODE: "full"}),
    "EP 2 x PP 2": (4, "moe", {EP: 2, PP: 2, "model.args.n_layers": 4}),
    "float8, gathered by FSDP": (2, "tiny", {**FLOAT8, **GATHERED}),
    "float8, TP 2": (2, "tiny", {**FLOAT8, **ROWWISE, TP: 2}),
}


def both(site: str, folder: str, recipe: str, overrides: dict[str, object]) -> tuple[RunRecord, RunRecord, int]:
    """Return the records of a run with offloading and of one without, and the number of copies to the host."""
    os.chdir(folder)
    sys.path.insert(0, site)
    try:
        plain = run_recipe(recipe, {**overrides, **SHORT}, weights=True)
        with mock.patch.object(Stored, "fetched", autospec=True, side_effect=Stored.fetched) as fetched:
            return run_recipe(recipe, {**overrides, **SHORT, SHARE: 1.0}, weights=True), plain, fetched.call_count
    finally:
        sys.path.remove(site)


@pytest.mark.parametrize("job", rows(JOBS, ("EP 2, selective",), tuple(JOBS)))
def test_training_is_bitwise_that_without(gloo: GlooPool, experts: str, tmp_path: Path, job: str) -> None:
    ranks, recipe, overrides = JOBS[job]
    settings = {**EXPERTS, **overrides} if recipe == "moe" else overrides
    for offloading, plain, copies in gloo.run(ranks, both, experts, str(tmp_path), recipe, settings):
        assert copies
        assert offloading.losses == plain.losses and offloading.statistics == plain.statistics
        for found, expected in ((offloading.gradients, plain.gradients), (offloading.final, plain.final)):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
