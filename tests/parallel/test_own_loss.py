"""A loss that a plugin has set is computed on every mesh, or refused before the first step."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness import small_gpt
from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_job
from harness.transforms import transform
from titan_core.api.components import Phase
from titan_core.api.errors import UserError

TP = {"parallelism.tensor_parallel_degree": 2}
COMPILED_LOSS = {"compile.enable": "true", "compile.components": '["loss"]', "compile.backend": "eager"}
BRIEF: dict[str, object] = {"training.steps": 2, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}


def train(folder: str, overrides: dict[str, object], phase: Phase) -> RunRecord | str:
    """What a run with a loss of its own did, or why it was refused."""
    os.chdir(folder)
    job = small_gpt.job_of(small_gpt.definition(), {**BRIEF, **overrides}, int(os.environ["WORLD_SIZE"]))
    transforms = sorted([*job.transforms, transform("own_loss", phase)], key=lambda one: one.phase)
    try:
        return run_job(replace(job, transforms=tuple(transforms)))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        {**TP, "parallelism.disable_loss_parallel": "true"},
        {"parallelism.pipeline_parallel_degree": 2},
        {"parallelism.context_parallel_degree": 2, **COMPILED_LOSS},
    ],
    ids=str,
)
def test_it_is_computed(gloo: GlooPool, tmp_path: Path, overrides: dict[str, object]) -> None:
    (one,) = gloo.run(1, train, str(tmp_path), {}, Phase.PRECISION)
    for record in gloo.run(2, train, str(tmp_path), overrides, Phase.PRECISION):
        assert record.losses == pytest.approx(one.losses, rel=1e-5)


def test_tensor_parallelism_does_not_replace_it(gloo: GlooPool, tmp_path: Path) -> None:
    message = (
        "transform 'tensor_parallel': it computes cross entropy on a divided vocabulary, and an earlier transform has set"
    )
    for refusal in gloo.run(2, train, str(tmp_path), TP, Phase.PRECISION):
        assert refusal.startswith(message)
        assert "set parallelism.disable_loss_parallel = true" in refusal


@pytest.mark.parametrize(("overrides", "earlier"), [(TP, "tensor_parallel"), (COMPILED_LOSS, "compile")])
def test_it_does_not_replace_what_an_earlier_transform_set(
    gloo: GlooPool, tmp_path: Path, overrides: dict[str, object], earlier: str
) -> None:
    for refusal in gloo.run(2, train, str(tmp_path), overrides, Phase.DATA):
        assert refusal.startswith(
            f"transform 'own_loss': it drops or replaces the part's loss that transform '{earlier}' had set"
        )
