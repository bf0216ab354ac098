"""`titan train` is killed at steps that a seed draws, and resumed on other numbers of processes: each step trains on the
tokens of an undisturbed run. For text that is tokenised on the fly, another tool's token ids, and a store.

    uv run pytest -m long tests/integration/test_killed_data.py
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.session import SEQUENCES
from benchmarks.chaos.trail import differences, trajectory
from harness.fake_s3 import BUCKET, running, use
from harness.kinds_of_data import KINDS
from harness.recorded_jobs import Recorded
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
