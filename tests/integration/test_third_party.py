"""What a third party's packages can rely on: installed beside ours, they work without a change to ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def install(folder: Path, example: str) -> dict[str, str]:
    """Install an example into a folder of its own, as an index would give it; the environment that sees it."""
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
            str(EXAMPLES / example),
        ],
        check=True,
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_a_third_partys_model_trains_under_fsdp_and_tp(tmp_path: Path) -> None:
    environment = install(tmp_path / "site", "titan-model-tinygpt")

    def titan(*arguments: str) -> str:
        command = [sys.executable, "-m", "titan_core", *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    listing = json.loads(titan("plugins", "--json"))
    assert "titan-model-tinygpt" in {plugin["distribution"] for plugin in listing["plugins"]}
    short = ["--training.steps", "8", "--metrics.log_freq", "1", "--job.device", "cpu"]
    losses = {}
    meshes = {"one": ("1", []), "fsdp": ("2", []), "tp": ("2", ["--parallelism.tensor_parallel_degree", "2"])}
    for mesh, (processes, flags) in meshes.items():
        titan("train", "tinygpt", "--nproc-per-node", processes, *short, *flags, "--job.dump_folder", mesh)
        lines = (tmp_path / mesh / "metrics.jsonl").read_text().splitlines()
        losses[mesh] = [json.loads(line)["loss"] for line in lines]
    assert losses["fsdp"] == pytest.approx(losses["one"], rel=1e-5)
    assert losses["tp"] == pytest.approx(losses["one"], rel=1e-5)
    assert losses["one"][-1] < losses["one"][0] - 0.3
