"""A wrapped objective is computed on every mesh, or refused before the first step."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness import small_gpt
from harness.transforms import transform
from titan_core.api import Phase, UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_job

TP = {"parallelism.tensor_parallel_degree": 2}
COMPILED_LOSS = {"compile.enable": "true", "compile.components": '["loss"]', "compile.backend": "eager"}
CHUNKS: dict[str, object] = {"objective.chunk_tokens": 24}
BRIEF: dict[str, object] = {"training.steps": 2, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}


def train(folder: str, overrides: dict[str, object], function: str, phase: Phase) -> RunRecord | str:
    """Train with the transform ``function``; return the record of the run, or why it was refused."""
    os.chdir(folder)
    job = small_gpt.job_of(small_gpt.definition(), {**BRIEF, **overrides}, int(os.environ["WORLD_SIZE"]))
    transforms = sorted([*job.transforms, transform(function, phase)], key=lambda component: component.phase)
    try:
        return run_job(replace(job, transforms=tuple(transforms)))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(TP, marks=pytest.mark.full),
        pytest.param({**TP, **CHUNKS}, marks=pytest.mark.full),
        {**TP, "parallelism.disable_loss_parallel": "true", **CHUNKS},
        pytest.param({"parallelism.pipeline_parallel_degree": 2, **CHUNKS}, marks=pytest.mark.full),
        {
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble",
            "parallelism.pipeline_parallel_layers_per_stage": 1,
            "parallelism.pipeline_parallel_first_stage_less_layers": 0,
            "parallelism.pipeline_parallel_last_stage_less_layers": 0,
            **CHUNKS,
        },
        {"parallelism.context_parallel_degree": 2, **COMPILED_LOSS},
        pytest.param(
            {"parallelism.fsdp_reshard_after_forward": "always", **COMPILED_LOSS, **CHUNKS}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_a_wrapped_objective_is_computed_on_every_mesh(gloo: GlooPool, tmp_path: Path, overrides: dict[str, object]) -> None:
    (one,) = gloo.run(1, train, str(tmp_path), {}, "wrapped_loss", Phase.PRECISION)
    (plain,) = gloo.run(1, train, str(tmp_path), {}, "batches", Phase.PRECISION)
    assert one.losses[0] > plain.losses[0] + 1e-4
    for record in gloo.run(2, train, str(tmp_path), overrides, "wrapped_loss", Phase.PRECISION):
        assert record.losses == pytest.approx(one.losses, rel=1e-5)


def test_tensor_parallelism_needs_an_objective_on_sharded_logits(gloo: GlooPool, tmp_path: Path) -> None:
    for refusal in gloo.run(2, train, str(tmp_path), TP, "whole_vocabulary", Phase.PRECISION):
        assert refusal.startswith("objective.name: needs logits of the whole vocabulary, and tensor parallelism shards them")
        assert "set parallelism.disable_loss_parallel = true" in refusal
    gathered = {**TP, "parallelism.disable_loss_parallel": "true"}
    (one,) = gloo.run(1, train, str(tmp_path), {}, "whole_vocabulary", Phase.PRECISION)
    for record in gloo.run(2, train, str(tmp_path), gathered, "whole_vocabulary", Phase.PRECISION):
        assert record.losses == pytest.approx(one.losses, rel=1e-5)


def test_a_transform_must_not_replace_the_objective(gloo: GlooPool, tmp_path: Path) -> None:
    for refusal in gloo.run(1, train, str(tmp_path), COMPILED_LOSS, "other_loss", Phase.DATA):
        assert refusal.startswith(
            "transform 'other_loss': it drops or replaces the part's objective that transform 'compile' had set"
        )
