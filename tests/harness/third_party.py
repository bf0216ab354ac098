"""Installs the examples like third-party packages, and runs jobs that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.distributions import python_path
from titan_testing.jobs import RunRecord, run_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"


def install(folder: Path, *examples: str) -> dict[str, str]:
    """Install examples into ``folder`` as built packages; return an environment in which they are importable."""
    subprocess.run(
        [
            "uv",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--python",
            sys.executable,
            "--target",
            str(folder),
            *(str(EXAMPLES / example) for example in examples),
        ],
        check=True,
    )
    return {**os.environ, "PYTHONPATH": python_path(folder)}


def train_with(
    site: str, folder: str, recipe: str, overrides: dict[str, object], trace: Sequence[str] = ()
) -> tuple[RunRecord, dict[str, list[torch.Tensor]]]:
    """Train in this process with the packages in ``site``; return the record, and this rank's shards of the parameters
    ``trace`` after each step."""
    from titan_core.api import hookimpl

    os.chdir(folder)
    traced: dict[str, list[torch.Tensor]] = {name: [] for name in trace}

    class Trace:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            self.parameters = dict(pair for part in run.parts for pair in part.module.named_parameters())

        @hookimpl(trylast=True)
        def titan_step_end(self) -> None:
            for name, values in traced.items():
                values.append(self.parameters[name].detach().to_local().clone())

    sys.path.insert(0, site)
    try:
        return run_recipe(recipe, {"job.device": "cpu", **overrides}, observers=[Trace()]), traced
    finally:
        sys.path.remove(site)


TINY_LLAMA: dict[str, object] = {
    "model.args": "{dim = 48, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 100}",
    "training.seq_len": 48,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 6,
}
