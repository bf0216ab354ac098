"""Jobs of `titan train` that record what they train on (``benchmarks.chaos.site``), and may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.chaos.cluster import RECIPE, environment, processes_of, titan_train, wait_until_gone
from benchmarks.chaos.session import SEQUENCES
from benchmarks.chaos.site import titan_chaos
from benchmarks.chaos.site.titan_chaos import FOLDER, GATE, TRAIL
from benchmarks.chaos.trail import Attempt, attempts_in
from titan_testing import PATIENCE
from titan_testing.jobs import make_job, run_job


class Recorded:
    """A job that records what it trains on, and may be started again in its run directory."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._folder, self._settings = folder, settings
        (folder / TRAIL).mkdir(parents=True)

    @property
    def attempts(self) -> list[Attempt]:
        return attempts_in(self._folder)

    def train_here(self) -> None:
        """Train in this process to the end."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FOLDER, str(self._folder))
            job = make_job(str(RECIPE), {**self._settings, "job.dump_folder": self._folder / "run"})
            run_job(job, observers=[titan_chaos])

    def train(self, ranks: int, until: int | None = None) -> None:
        """Run ``titan train``.

        Args:
            until: kill all of its processes after this step, in the next one.
        """
        gate = self._folder / GATE
        gate.unlink(missing_ok=True)
        if until is not None:
            gate.write_text(str(until))
        before = len(self.attempts)
        overrides = [text for key, value in self._settings.items() for text in (f"--{key}", str(value))]
        command = titan_train(self._folder / "run", overrides, ["--nproc-per-node", str(ranks)])
        log = self._folder / f"log-{before}.txt"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment(self._folder), cwd=self._folder
            )
        try:
            if until is None:
                assert process.wait(PATIENCE) == 0, log.read_text()
                return
            deadline = time.monotonic() + PATIENCE
            while not any(until in one.complete(SEQUENCES) for one in self.attempts[before:]):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
        finally:
            killed = processes_of(self._folder)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            process.wait()
        assert wait_until_gone(self._folder, PATIENCE, killed) == {}
