"""Process groups of a job: the timeouts of collectives, and the threads and sockets that they take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from harness.quick import rows
from titan_core.api import hookimpl
from titan_core.loop.gc_settings import free_job
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe
from titan_testing.meshes import CP, DR, PP, TP

RUN: dict[str, object] = {
    **TINY,
    "training.steps": 2,
    "job.device": "cpu",
    DR: 2,
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
        assert (seen[1].pop("background"), seen[2].pop("background")) == (1800, 1800)
        assert len(seen[1]) > 1  # the default group and those of the mesh
        assert set(seen[1].values()) == {77}
        assert set(seen[2].values()) == {33}


def gloo_threads() -> set[str]:
    free_job()
    tasks = [Path(task.path) for task in os.scandir("/proc/self/task")]
    return {task.name for task in tasks if (task / "comm").read_text().startswith("pt_gloo")}


def threads_left(folder: str, mesh: dict[str, object]) -> int:
    """Return how many threads of process groups a job leaves: one that still runs while Python exits may abort the process.
    Those of an earlier job may end meanwhile."""
    os.chdir(folder)
    before = gloo_threads()
    run_recipe("tiny", {**TINY, "model.args": "{n_heads = 4, n_kv_heads = 2}", "job.device": "cpu", **mesh})
    return len(gloo_threads() - before)


MESHES: dict[str, dict[str, object]] = {"FSDP": {}, "TP": {TP: 2}, "DDP": {DR: 2}, "CP": {CP: 2}, "PP": {PP: 2}}


@pytest.mark.skipif(sys.platform != "linux", reason="lists threads in /proc")
@pytest.mark.parametrize("mesh", rows(MESHES, ["PP"]))
def test_no_thread_is_left(gloo: GlooPool, tmp_path: Path, mesh: str) -> None:
    assert gloo.run(2, threads_left, str(tmp_path), MESHES[mesh]) == [0, 0]


SOCKETS = Path(__file__).parents[2] / "benchmarks/sockets.py"
FOUR_DIMS = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.tensor_parallel_degree=2"]


def sockets(ranks: int, *arguments: str) -> int:
    """Return the largest number of sockets that a rank of a job on simulated GPUs opens, with real gloo and torch's fake
    backend in place of NCCL."""
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
def test_groups_of_the_mesh_that_have_gloo_connect_no_ranks_before_they_are_used() -> None:
    """Each of the three groups has a connection to the store of its own: gloo clones it (torch 2.15)."""
    assert sockets(8, "--training.enable_cpu_offload=true") <= sockets(8) + 3
