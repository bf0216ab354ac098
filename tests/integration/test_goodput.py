"""Time by cause of a real job, against a clock around its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.distributions import python_path, write_distribution
from harness.machines import is_running, metrics, starts
from titan_core.cli.main import main
from titan_core.toolkit.json_lines import read_lines
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.goodput import time_by_cause
from titan_testing import PATIENCE

JOB = [
    "--nproc-per-node", "2", "--max-restarts", "1",
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}",
    "--training.seq_len", "32", "--training.local_batch_size", "1", "--training.steps", "30", "--metrics.log_freq", "1",
    "--checkpoint.enable", "true", "--checkpoint.interval", "4", "--validation.enable", "true",
    "--validation.dataset", "stdlib", "--validation.freq", "5", "--validation.steps", "2", "--job.device", "cpu",
    "--job.dump_folder", "run",
]  # fmt: skip
SLOW = """
import os, signal, time
from titan_core.api import hookimpl

api = (1, 0)

@hookimpl
def titan_step_start(step):
    time.sleep(0.1)
    if step == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""Steps take 0.1 s, and the first attempt of a launcher loses a rank in step 7."""


@pytest.mark.long
def test_the_causes_of_a_killed_job_sum_to_the_time_around_its_processes(tmp_path: Path) -> None:
    """The launcher restarts it from step 4; it is killed with its launcher, and resumed later."""
    write_distribution(tmp_path / "site", "slow", SLOW)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(tmp_path / "site")}
    command = [sys.executable, "-m", "titan_core", "train", *JOB]
    began = time.time()
    job = subprocess.Popen(command, cwd=tmp_path, env=environment)
    while len(starts(tmp_path)) < 2 or metrics(tmp_path)[-1]["step"] < 15:
        assert job.poll() is None and time.time() < began + PATIENCE
        time.sleep(0.02)
    ranks = [one["pid"] for one in starts(tmp_path)[-1]["processes"]]
    job.send_signal(signal.SIGKILL)
    killed = time.time()
    job.wait()
    while any(map(is_running, ranks)):
        time.sleep(0.02)
    time.sleep(2.0)
    resumed = time.time()
    job = subprocess.Popen(command, cwd=tmp_path, env=environment)
    while not any(event["event"] == "end" and event["completed"] for event in read_lines(tmp_path / "run/events.jsonl")):
        assert job.poll() is None and time.time() < resumed + PATIENCE
        time.sleep(0.02)
    took = time.time() - began  # the processes exit later
    assert job.wait(PATIENCE) == 0

    run = RunLog.read(tmp_path / "run")
    spent = time_by_cause(run.events, run.times)
    seconds = spent.seconds
    assert len(spent.attempts) == 3
    assert spent.difference == pytest.approx(0, abs=0.01)
    assert spent.wall == pytest.approx(2 * took, rel=0.01)
    assert sum(seconds.values()) == pytest.approx(2 * took, rel=0.01)
    assert seconds["idle"] == pytest.approx(2 * (resumed - killed), abs=1.0)  # a step, and the start of Python
    assert seconds["restart"] > seconds["start"] / 2 > 0
    # Of each rank: steps 5 and 6, and what came after the checkpoint of step 12 or later; all 30 steps count.
    assert 2 * 0.2 < seconds["lost"] < 2 * 5
    assert 2 * 3.0 < seconds["steps"] < 2 * 15
    assert min(seconds["save"], seconds["evaluation"], seconds["data"]) > 0
    assert "compile" not in seconds and "not recorded" not in seconds
    assert main(["report", str(run.path)]) == 0
    assert "Goodput: " in (run.path / "report.html").read_text()
