"""Timeouts of collectives on every process group."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from harness.gloo_pool import GlooPool
from harness.jobs import run_recipe
from titan_core.api import hookimpl

RUN: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 2,
    "lr_scheduler.warmup_steps": 1,
    "job.device": "cpu",
    "parallelism.data_parallel_replicate_degree": 2,
    "checkpoint.enable": "true",
    "checkpoint.async_mode": '"async"',
    "comm.init_timeout_seconds": 77,
    "comm.train_timeout_seconds": 33,
}


class Timeouts:
    """Records the timeout of each group, in seconds, at the start of each step."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.seen[step] = {
            group.group_desc: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in distributed_c10d._world.pg_map
        }


def timeouts(folder: str) -> dict[int, dict[str, float]]:
    os.chdir(folder)
    seen = Timeouts()
    run_recipe("llama3_debug", RUN, observers=[seen])
    return seen.seen


def test_timeouts_shrink_after_the_first_step_except_for_background_work(gloo: GlooPool, tmp_path: Path) -> None:
    for seen in gloo.run(2, timeouts, str(tmp_path)):
        beside = seen[1].pop("background"), seen[2].pop("background")
        assert beside == (1800, 1800)
        assert len(seen[1]) > 1  # the default group and those of the mesh
        assert set(seen[1].values()) == {77}
        assert set(seen[2].values()) == {33}
