"""What a job does beside training leaves the next step as fast as the one before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import PATIENCE
from harness.quick import rows

SCRIPT = '''
import json, os, sys, threading

import torch

from harness.jobs import make_job
from titan_core.api import hookimpl
from titan_core.loop.training import train

numbers, teams, ours = {}, {}, set()
run_of_thread = threading.Thread.run

def run(thread):
    ours.add(str(thread.native_id))  # Linux may list it for a moment after threading.enumerate() no longer does
    try:
        run_of_thread(thread)
    finally:
        numbers.setdefault(thread.name.rpartition("_")[0] or thread.name, []).append(torch.get_num_threads())

def libraries():
    """Return the number of threads that are not Python's."""
    torch.ones(1 << 20).add_(1)  # the trainer's own team is there: on a busy machine, MKL lets it go for a while
    python = {str(thread.native_id) for thread in threading.enumerate()}
    return len(set(os.listdir("/proc/self/task")) - python - ours)

class Watch:
    @hookimpl
    def titan_train_start(self):
        threading.Thread.run = run

    @hookimpl(trylast=True)
    def titan_step_end(self, report):
        if report.step == 1:
            self.before = libraries()

    @hookimpl(trylast=True)
    def titan_train_end(self):
        teams["new"] = libraries() - self.before

mode, folder = sys.argv[1:]
settings = {
    "job.device": "cpu", "job.dump_folder": folder, "training.steps": 3, "training.seq_len": 16,
    "training.local_batch_size": 1, "training.global_batch_size": 1, "metrics.log_freq": 1,
    "checkpoint.enable": "true", "checkpoint.interval": 2, "checkpoint.async_mode": mode, "sample.enable": "false",
    "model.args": "{n_layers = 12, dim = 64, ffn_dim = 64}",  # its plan of a save is larger than gloo copies in one piece
}
train(make_job("llama3_debug", settings), [Watch()])
print(json.dumps({"numbers": numbers, **teams}))
'''


def threads_of_a_job(mode: str, folder: Path) -> dict[str, Any]:
    """Train with two threads. Return how many threads operators had in each thread that ended, by name, and the number of
    threads of libraries that there are more of than after the first step."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }  # spinning costs time on a busy machine
    command = [sys.executable, "-c", SCRIPT, mode, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads that Linux lists in /proc")
@pytest.mark.parametrize("mode", rows(["disabled", "async"], quick=["async"]))
def test_a_job_with_checkpoints_keeps_one_team(mode: str, in_tmp: Path) -> None:
    found = threads_of_a_job(mode, in_tmp / "run")
    assert found["numbers"].pop("number of threads") == [2]  # the one that gives the number back after the job
    assert set().union(*found["numbers"].values()) == {1}, found
    assert ("checkpoint" in found["numbers"]) == (mode == "async")
    assert found["new"] <= 0
