"""Built wheels in fresh environments: a job installs what it needs and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run(["uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.mark.wheels
def test_core_and_a_model_are_enough(wheels: Path, tmp_path: Path) -> None:
    assert len(list(wheels.glob("titan_*.whl"))) == 10
    python = tmp_path / "venv/bin/python"
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    chosen = [str(wheel) for name in ("core", "models_llama") for wheel in wheels.glob(f"titan_{name}-*.whl")]
    version = torch.__version__.partition("+")[0]
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(python), *chosen, f"torch=={version}"], check=True)

    def titan(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tmp_path / "venv/bin/titan"), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    listing = titan("plugins").stdout
    assert "titan-models-llama" in listing
    assert "titan-parallel" not in listing
    short = ["--training.steps", "3", "--model.args.n_layers", "1", "--training.seq_len", "32"]
    result = titan("train", *short)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "outputs/llama3_debug/metrics.jsonl").exists()

    refused = titan("train", *short, "--nproc-per-node", "2")
    assert refused.returncode == 2
    assert "--nproc-per-node: no plugin in use starts processes; install titan-launch" in refused.stderr
    refused = titan("config", "check", "--parallelism.tensor_parallel_degree", "2", "--world-size", "2")
    assert refused.returncode == 2
    assert "tensor_parallel_degree = 2: no plugin in use provides it; install titan-parallel" in refused.stderr
    refused = titan("config", "check", "--world-size", "2")
    assert refused.returncode == 2
    assert "install titan-parallel" in refused.stderr
    refused = titan("checkpoint", "list", "outputs/llama3_debug")
    assert refused.returncode == 2
    assert "titan checkpoint: this command comes with titan-ckpt; install titan-ckpt" in refused.stderr
    refused = titan("train", *short, "--float8.recipe_name", "rowwise")
    assert refused.returncode == 2
    assert "install titan-float8" in refused.stderr
