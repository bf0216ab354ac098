"""The precision benchmark runs at toy size, emulated."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/precision.py"), "--steps", "3", "--csv", str(tmp_path / "curves.csv"),
               "--only", "compiled float8, rowwise", "--compile.backend", "eager", "--job.device", "cpu"]  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "| eager bf16 |" in result.stdout
    assert "| compiled float8, rowwise |" in result.stdout
    steps = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert len(steps) == 5  # two warmup steps and three measured ones
    assert float(steps[-1]["eager bf16"]) != float(steps[-1]["compiled float8, rowwise"])
