"""`titan train` is killed at steps that a seed draws, and resumed on other numbers of processes: each step trains on the
tokens of an undisturbed run. For text that is tokenised on the fly, another tool's token ids, and a store.

    uv run pytest -m long tests/integration/test_killed_data.py
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.cluster import RECIPE, environment, processes_of, titan_train, wait_until_gone
from benchmarks.chaos.session import SEQUENCES
from benchmarks.chaos.site import titan_chaos
from benchmarks.chaos.site.titan_chaos import FOLDER, GATE, TRAIL
from benchmarks.chaos.trail import Attempt, attempts_in, differences, trajectory
from harness import PATIENCE
from harness.fake_s3 import BUCKET, running, use
from harness.jobs import make_job, run_job
from harness.kinds_of_data import KINDS
from titan_data import remote_bytes

RANKS = (1, 2, 4)
SOURCES = {"on the fly": "JSON lines", "of another tool": "Megatron-LM", "from a store": "`titan data tokenize`"}


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What reads a source's data."""
    made = KINDS[SOURCES[request.param]](tmp_path)
    path = tmp_path / str(made["training.dataset_path"])  # an absolute one stays as it is
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    if request.param != "from a store":
        yield {**made, "training.dataset_path": path}
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with running() as store:
        use(store, monkeypatch, tmp_path / "cache")
        store.put(path, "tokens/")
        yield {**made, "training.dataset_path": f"s3://{BUCKET}/tokens"}
    remote_bytes._threads().shutdown()
    remote_bytes._threads.cache_clear()


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
            for pid in processes_of(self._folder):
                os.kill(pid, signal.SIGKILL)
            process.wait()
        assert wait_until_gone(self._folder, PATIENCE) == {}


def require_same_tokens(job: Recorded, undisturbed: Recorded, steps: int, kills: int) -> None:
    expected, problems = trajectory(undisturbed.attempts, SEQUENCES)
    assert len(expected) == steps and problems == []
    attempts = job.attempts
    assert len(attempts) == kills + 1 and len({one.world for one in attempts}) > 1
    assert attempts[-1].begun > 0, "it resumed from a checkpoint"
    final, problems = trajectory(attempts, SEQUENCES)
    assert problems + differences(final, expected) == []


@pytest.mark.full
@pytest.mark.parametrize("settings", ["from a store"], indirect=True)
def test_a_job_that_is_killed_once_trains_on_the_same_tokens(settings: dict[str, object], tmp_path: Path) -> None:
    settings = {**settings, "training.steps": 8}
    job, undisturbed = Recorded(tmp_path / "killed", settings), Recorded(tmp_path / "undisturbed", settings)
    job.train(2, until=5)
    job.train_here()
    undisturbed.train_here()
    require_same_tokens(job, undisturbed, 8, 1)


@pytest.mark.long
@pytest.mark.parametrize("settings", SOURCES, indirect=True)
def test_a_job_that_is_killed_ten_times_trains_on_the_same_tokens(
    settings: dict[str, object], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    chance = random.Random(request.node.name)
    settings = {**settings, "training.steps": 40}
    job, undisturbed = Recorded(tmp_path / "killed", settings), Recorded(tmp_path / "undisturbed", settings)
    ranks = 2
    for until in sorted(chance.sample(range(3, 40), 10)):
        job.train(ranks, until)
        ranks = chance.choice([one for one in RANKS if one != ranks])
    job.train(ranks)
    undisturbed.train_here()
    require_same_tokens(job, undisturbed, 40, 10)
