"""Settings of runs that stop and resume."""

from __future__ import annotations

import os
from typing import Any

from titan_testing.jobs import RunRecord, run_recipe

SETTINGS: dict[str, object] = {
    "model.args": "{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 100}",
    "training.seq_len": 48,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 8,
    "training.deterministic": "true",
    "lr_scheduler.warmup_steps": 3,
    "checkpoint.enable": "true",
    "checkpoint.interval": 3,
    "job.device": "cpu",
}


def run_in(folder: str, overrides: dict[str, object], observers: tuple[Any, ...] = ()) -> RunRecord:
    os.chdir(folder)
    return run_recipe("tiny", {**SETTINGS, **overrides}, weights=True, observers=observers)
