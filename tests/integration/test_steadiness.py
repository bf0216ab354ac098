"""What a job does beside training leaves the next step as fast as the one before, and nothing grows with its length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.steadiness import TINY, Held, Samples, growth_of
from harness.quick import rows
from titan_core.api import StepReport, hookimpl
from titan_testing import PATIENCE
from titan_testing.jobs import run_recipe

SCRIPT = '''
import json, os, sys, threading

import torch

from titan_testing.jobs import make_job
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


class Leaks:
    """Keeps the loss of each step, and a file."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        self.kept += [report.loss.clone(), open("run/events.jsonl")]  # noqa: SIM115

    @hookimpl
    def titan_train_end(self) -> None:
        for file in self.kept[1::2]:
            file.close()


def grows_in(steps: int, *observers: object) -> set[str]:
    """Train, and return which counts of what the process holds are larger in the second half."""
    often = dict.fromkeys(("checkpoint.interval", "validation.freq", "sample.freq"), steps // 20)
    # A save in the background may hold a file or a copy at any time.
    settings = {**TINY, **often, "checkpoint.async_mode": "disabled", "training.steps": steps, "job.dump_folder": "run"}
    samples = Samples(steps // 10)
    run_recipe("llama3_debug", settings, observers=[*observers, samples])
    assert len(samples.held) == 10
    # Times, and bytes that the allocators keep, tell only in a longer run.
    counted = {"tensors", "tensor_kib", "descriptors", "threads", "files"}
    return {line.partition(":")[0] for line in growth_of(samples.held)} & counted


ON_LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the files that Linux lists in /proc")


@ON_LINUX
@pytest.mark.full
def test_a_long_run_holds_no_more_than_a_short_one(in_tmp: Path) -> None:
    """The short form of ``python -m benchmarks.steadiness --long 100000``."""
    assert grows_in(200) == set()


@ON_LINUX
@pytest.mark.full
def test_what_a_run_keeps_of_each_step_is_found(in_tmp: Path) -> None:
    assert grows_in(100, Leaks()) == {"tensors", "tensor_kib", "descriptors"}


SAME: dict[str, Any] = {
    "steps_per_second": 9.0, "cpu_ms": 8.0, "rss_mib": 700.0, "malloc_mib": 150.0, "tensors": 66, "tensor_kib": 132.0,
    "objects": 1500, "blocks": 10**6, "descriptors": 19, "threads": 11, "files": 9,
}  # fmt: skip


def test_growth_is_told_from_noise() -> None:
    def growing(**last: float) -> list[str]:
        held = [Held(step=1000 * number, **{**SAME, **(last if number > 10 else {})}) for number in range(1, 21)]
        return [line.partition(":")[0] for line in growth_of(held)]

    assert growing() == growing(cpu_ms=8.3, rss_mib=700.2, malloc_mib=150.1, objects=1501) == []
    for name, value in {"cpu_ms": 8.5, "rss_mib": 701, "malloc_mib": 151, "objects": 3000, "threads": 12}.items():
        assert growing(**{name: value}) == [name]
