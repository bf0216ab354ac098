"""Jobs one after the other in the same processes, which share one store."""

from __future__ import annotations

import os
from pathlib import Path

from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe

JOBS = 12


def losses_of_jobs(folder: str, jobs: int) -> list[list[float]]:
    """Return the losses of each job."""
    os.chdir(folder)
    return [run_recipe("tiny", {**TINY, "training.steps": 1, "training.seed": number}).losses for number in range(jobs)]


def test_each_job_has_keys_of_its_own_in_the_store(gloo: GlooPool, tmp_path: Path) -> None:
    first, second = gloo.run(2, losses_of_jobs, str(tmp_path), JOBS)
    assert first == second
    assert len({losses[0] for losses in first}) == JOBS
