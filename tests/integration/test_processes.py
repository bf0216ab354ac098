"""The processes of a job: two jobs in one folder, interrupts, kills, and the launcher's last line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.distributions import python_path, write_distribution
from harness.machines import is_running
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.json_lines import read_lines
from titan_testing import PATIENCE

SMALL = [
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}", "--training.seq_len", "32",
    "--training.local_batch_size", "1", "--training.global_batch_size", "2", "--metrics.log_freq", "1",
    "--job.device", "cpu", "--job.dump_folder", "run",
]  # fmt: skip
TITAN = "uv run python -m titan_core" if "UV_RUN_RECURSION_DEPTH" in os.environ else "python -m titan_core"
"""How :class:`Started` runs it, as printed commands do."""


class Started:
    """A ``titan train`` with two ranks."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "titan_core", "train", "--nproc-per-node", "2", *SMALL, *arguments]
        self._run = folder / "run"
        self.errors = folder / "errors.txt"
        variables, silent = {**os.environ, **environment}, subprocess.DEVNULL
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, cwd=folder, env=variables, stdout=silent, stderr=errors)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of the run so far."""
        return [event for event in read_lines(self._run / "events.jsonl") if event["event"] == kind]

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(line["step"] >= step for line in read_lines(self._run / "metrics.jsonl")))

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return exit status and standard error."""
        return self.process.wait(PATIENCE), self.errors.read_text()


@pytest.mark.full
def test_second_job_refused_interrupt_saves_and_killed_launcher_ends_ranks(tmp_path: Path) -> None:
    checkpoints = ["--training.steps", "100000", "--checkpoint.enable", "true"]
    job = Started(tmp_path, *checkpoints)
    job.wait_for_step(1)

    second = subprocess.run(
        [sys.executable, "-m", "titan_core", "train", "--nproc-per-node", "2", *SMALL],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert second.returncode == 2
    assert f"job.dump_folder = 'run': process {job.process.pid} on host " in second.stderr

    job.process.send_signal(signal.SIGINT)
    status, errors = job.end()
    assert status == 130, errors
    assert "titan: interrupted: stopping after this step; Ctrl-C again ends at once\n" in errors
    saved = job.events("checkpoint")[-1]
    last = errors.splitlines()[-1]
    step, path = saved["step"], saved["path"]
    assert last.startswith(
        f"titan: interrupted after step {step}, saved in {path}; to resume: {TITAN} train --nproc-per-node 2"
    )
    (end,) = job.events("end")
    assert end["interrupted"] and not end["failed"]
    assert "Traceback" not in errors

    job = Started(tmp_path, *checkpoints)
    job.wait_for_step(step + 1)
    ranks = [one["pid"] for one in job.events("start")[-1]["processes"]]
    assert job.events("start")[-1]["step"] == step
    job.process.kill()
    job.process.wait()
    while any(map(is_running, ranks)):
        time.sleep(0.05)
    with FolderLock(tmp_path / "run", "the folder of a job that was killed"):
        pass


TROUBLE = """
import os
import signal

from titan_core.api import hookimpl

api = (1, 0)

def raises():
    raise ValueError("shard 17 is unreadable")

def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

@hookimpl
def titan_step_start(step):
    if step == 3 and os.environ.get("RANK") == "1":
        (raises, is_killed)[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]()
"""


@pytest.mark.full
def test_the_launcher_names_the_first_cause_and_the_attempt(tmp_path: Path) -> None:
    write_distribution(tmp_path / "site", "trouble", TROUBLE)
    site = str(tmp_path / "site")
    job = Started(tmp_path, "--max-restarts", "1", "--training.steps", "9", PYTHONPATH=python_path(site))
    status, errors = job.end()
    assert status == 128 + signal.SIGKILL, errors
    assert "Traceback" not in errors
    first, second = (line for line in errors.splitlines() if line.startswith("titan: error: "))
    assert first.startswith(
        "titan: error: rank 1 in step 3: plugin 'trouble' (trouble 1.0): titan_step_start raised ValueErr"
    )
    assert first.endswith("; the traceback is in run/logs/attempt-1/rank-1.log; restarting (attempt 2 of 2)")
    why = "titan: error: rank 1 was killed by SIGKILL in step 3 (out of memory?); see run/logs/rank-1.log; "
    assert second.startswith(why)
    assert second.endswith("; see `titan analyse run`")
    assert errors.splitlines()[-1] == second
    assert "ValueError: shard 17 is unreadable" in (tmp_path / "run/logs/attempt-1/rank-1.log").read_text()
    assert not list(tmp_path.glob("run/previous/*/logs"))
    assert "step 2/9" in (tmp_path / "run/logs/rank-0.log").read_text()
