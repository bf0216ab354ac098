"""One real rank of a job of any size has the weights of that rank, and its figures add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("titan_simulate")

from titan_core.api import Run, RunEnd, UserError, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.loop.training import train
from titan_simulate.engine.real_rank import SETTINGS, WARM_UP, MeasuredRank, measure_rank
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job, run_recipe

STEPS = 2
REAL: dict[str, object] = {**TINY, **SETTINGS, "training.steps": WARM_UP + STEPS + 1, "job.device": "cpu"}


class Weights:
    """Keeps this rank's initial weights."""

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        self.local: dict[str, Tensor] = {}
        for name, tensor in run.parts[0].named_parameters():
            self.local[name] = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def measured(folder: str, ranks: int, rank: int, overrides: dict[str, object]) -> tuple[MeasuredRank, dict[str, Tensor]]:
    os.chdir(folder)
    weights = Weights()

    def observed(job: AssembledJob, observers: Iterable[object]) -> RunEnd:
        return train(job, [*observers, weights])

    job = make_job("tiny", {**REAL, "training.global_batch_size": -1, **overrides}, ranks)
    return measure_rank(job, observed, rank, STEPS), weights.local


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (8, 3)])
def test_a_real_rank_has_the_weights_of_that_rank(gloo: GlooPool, tmp_path: Path, ranks: int, rank: int) -> None:
    ((found, local),) = gloo.run(1, measured, str(tmp_path), ranks, rank, {})
    os.chdir(tmp_path)
    whole = run_recipe("tiny", {**TINY, "training.steps": 1, "job.device": "cpu"}, weights=True).initial
    for name, tensor in whole.items():
        assert torch.equal(local[name], tensor.chunk(ranks)[rank]), name
    assert (found.rank, found.world_size, found.mesh, found.steps) == (rank, ranks, f"dp_shard={ranks}", STEPS)


def test_the_figures_add_up(gloo: GlooPool, tmp_path: Path) -> None:
    ((found, _),) = gloo.run(1, measured, str(tmp_path), 4, 0, {})
    assert found.tokens_per_second * found.step_seconds == pytest.approx(2 * 32)  # the sequences of a rank
    assert 0 < found.host_seconds < STEPS * found.step_seconds
    assert found.memory.reserved_gib is None and 0 < found.memory.active_gib <= found.memory.peak_gib


def test_a_rank_that_the_job_does_not_have_is_refused(in_tmp: Path) -> None:
    with pytest.raises(UserError, match="--rank 4: the job has 4 ranks"):
        measure_rank(make_job("tiny", {**REAL, "training.global_batch_size": -1}, 4), train, 4, STEPS)


def test_a_job_of_fewer_steps_is_refused(in_tmp: Path) -> None:
    job = make_job("tiny", {**REAL, "training.steps": WARM_UP})
    with pytest.raises(UserError, match=r"a measurement of 2 steps takes 6; set training\.steps = 6"):
        measure_rank(job, train, 0, STEPS)


def command(folder: str, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status and the output of ``titan``."""
    found = subprocess.run(
        [sys.executable, "-m", "titan_core", "simulate", "tiny", "--world-size", "2", "--real-rank", *arguments],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    return found.returncode, found.stdout, found.stderr


def test_the_command_prints_what_it_measures(tmp_path: Path) -> None:
    status, out, err = command(str(tmp_path), "--json", "--steps", "2", "--rank", "1", "--job.device", "cpu")
    assert status == 0, err
    found = json.loads(out)
    assert (found["rank"], found["world_size"], found["steps"]) == (1, 2, 2)
    assert found["step_seconds"] > 0 and found["memory"]["peak_gib"] > 0


def test_what_only_a_simulation_counts_is_refused(tmp_path: Path) -> None:
    status, _, err = command(str(tmp_path), "--full")
    assert status == 2
    assert "--full: counts what a simulated device does, and --real-rank measures; drop one of the two" in err
