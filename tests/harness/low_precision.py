"""Settings of runs in low precision."""

from __future__ import annotations

import os

from titan_testing.jobs import RunRecord, run_recipe

WHOLE: dict[str, object] = {
    "training.steps": 200,
    # A quarter of the recipe's batch: emulation is slow.
    "training.global_batch_size": 4,
    "training.local_batch_size": 2,
    "training.mixed_precision_param": "bfloat16",
    "job.device": "cpu",
}


RECIPES: dict[str, dict[str, object]] = {
    "tensorwise": {"float8.enable": "true", "float8.emulate": "true"},
    "tensorwise, float8 all-gather": {
        "float8.enable": "true",
        "float8.emulate": "true",
        "float8.enable_fsdp_float8_all_gather": "true",
        "float8.precompute_float8_dynamic_scale_for_fsdp": "true",
    },
    "rowwise": {"float8.enable": "true", "float8.emulate": "true", "float8.recipe_name": "rowwise"},
    "rowwise_with_gw_hp": {"float8.enable": "true", "float8.emulate": "true", "float8.recipe_name": "rowwise_with_gw_hp"},
    "mxfp8_rceil": {"mx.enable": "true", "mx.emulate": "true"},
    "nvfp4": {"mx.enable": "true", "mx.emulate": "true", "mx.recipe_name": "nvfp4"},
}


FAST: dict[str, object] = {
    **WHOLE,
    "training.steps": 12,
    "model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "lr_scheduler.warmup_steps": 3,
}


def run_in(folder: str, overrides: dict[str, object], recipe: str = "tiny") -> RunRecord:
    os.chdir(folder)
    return run_recipe(recipe, overrides)
