"""Sockets that a rank of a job on GPUs opens, with real gloo and NCCL replaced by torch's fake backend."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOCKETS = Path(__file__).parents[2] / "benchmarks/sockets.py"
FOUR_DIMS = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.tensor_parallel_degree=2"]


def sockets(ranks: int, *arguments: str) -> int:
    """Return the largest number of sockets that a rank of a job on simulated GPUs opens."""
    command = [sys.executable, str(SOCKETS), f"--ranks={ranks}", "--recipe=tiny", *FOUR_DIMS, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(re.findall("[0-9]+", result.stdout)[-1])


@pytest.mark.full
def test_the_connections_of_a_rank_do_not_grow_with_the_number_of_ranks() -> None:
    """Each rank is connected to its neighbours in the ring and in the tree of the group of all ranks."""
    few = sockets(8)
    assert few <= 6
    assert sockets(24, "--training.global_batch_size=48") <= few + 2


@pytest.mark.full
def test_groups_of_the_mesh_that_have_gloo_add_no_connection_before_they_are_used() -> None:
    assert sockets(8, "--training.enable_cpu_offload=true") <= 8
