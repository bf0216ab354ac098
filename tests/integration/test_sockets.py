"""Sockets that a rank of a job on GPUs opens, with real gloo and NCCL replaced by torch's fake backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOCKETS = Path(__file__).parents[2] / "benchmarks/sockets.py"
FOUR_DIMS = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.tensor_parallel_degree=2"]


def sockets(*arguments: str) -> int:
    """Return how many more sockets than ranks each rank of a job on 8 simulated GPUs opens."""
    command = [sys.executable, str(SOCKETS), "--ranks=8", "--recipe=tiny", *FOUR_DIMS, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.rpartition("(")[2].split()[0])


@pytest.mark.full
def test_a_rank_on_a_gpu_has_one_socket_per_rank() -> None:
    assert sockets() <= 8


@pytest.mark.full
def test_cpu_offload_needs_gloo_on_every_mesh_dimension() -> None:
    assert sockets("--training.enable_cpu_offload=true") > sockets()
