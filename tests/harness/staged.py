"""A recipe of three stages, which differ in everything that a stage may change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from titan_testing.jobs import RunRecord, run_recipe

MODEL = """
[model]
name = "llama3"
flavor = "debug"
tokenizer = "byte"
args = {dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 2, ffn_dim = 64}
"""
RECIPE = (
    MODEL
    + """
[training]
steps = 12
seq_len = 32
local_batch_size = 2
global_batch_size = 8
deterministic = true

[optimizer]
lr = 2e-3

[lr_scheduler]
warmup_steps = 3

[metrics]
log_freq = 4

[checkpoint]
enable = true
interval = 100
keep_latest_k = 0

[job]
device = "cpu"

[[data.mixture]]
name = "web"
dataset = "json"
dataset_path = "web.jsonl"
weight = 3.0

[[data.mixture]]
name = "code"
dataset = "json"
dataset_path = "code.jsonl"

[[stages]]
name = "long"
at_step = 4

[stages.training]
seq_len = 64
local_batch_size = 1
global_batch_size = 4

[stages.model.args]
rope_theta = 50000.0

[[stages]]
name = "anneal"
at_tokens = 2048

[stages.training]
global_batch_size = 8

[stages.lr_scheduler]
min_lr_factor = 0.2

[[stages.data.mixture]]
name = "books"
dataset = "json"
dataset_path = "books.jsonl"

[[stages.data.mixture]]
name = "web"
dataset = "json"
dataset_path = "web.jsonl"
"""
)
SOURCES = ("web", "code", "books")


def write_recipe(folder: Path, recipe: str = RECIPE) -> None:
    """Write ``staged.toml`` and the data of its sources."""
    for number, name in enumerate(SOURCES):
        texts = [f"{name} {index}: " + chr(97 + number) * (index * 7 % 90 + 1) for index in range(60)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "staged.toml").write_text(recipe)


def run_staged(folder: str, overrides: dict[str, object], observers: tuple[Any, ...] = ()) -> RunRecord:
    """Train the recipe in ``folder``, from where its run stands."""
    os.chdir(folder)
    return run_recipe("staged.toml", overrides, weights=True, observers=observers)
