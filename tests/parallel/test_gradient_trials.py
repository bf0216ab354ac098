"""A division whose loss is right and whose gradients are wrong is refused before the first step, with the parameter and the
dimension of the mesh. Correct ones train."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from harness import small_gpt
from harness.own_mixers import with_mean, with_means
from harness.planted_gradients import AFTER, CP, FSDP, NO_SP, PLANTS, GainAfterSum, with_mlp
from titan_core.api import UserError, hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_job

BRIEF: dict[str, object] = {"training.steps": 1, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
NAMES = {"tensor": "tp=2", "context": "cp=2", "pipeline": "pp=2",
    "data_parallel_shard": "dp_shard=2", "data_parallel_replicate": "dp_replicate=2"}  # fmt: skip


def train(folder: str, name: str) -> list[str]:
    """Train with the plant ``name``; return the steps that began, and why it was refused."""
    os.chdir(folder)
    (plant,) = [plant for plant in PLANTS if plant.name == name]
    steps: list[str] = []

    class Steps:
        @hookimpl
        def titan_step_start(self, step: int) -> None:
            steps.append(f"step {step}")

    job = small_gpt.job_of(small_gpt.definition(plant.build, plant.layout), {**BRIEF, **plant.mesh}, 2)
    with plant.planted():
        try:
            run_job(job, observers=[Steps()])
        except UserError as error:
            steps.append(str(error))
    return steps


QUICK = {
    "a sum taken twice", "a gain after the sum", "a detached branch", "a mixer that keeps its addend",
    "a ring that loses keys", "gradients averaged", "a stale norm", "a stage that doubles",
    "queries, keys and values in one layer",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(plant.name, marks=() if plant.name in QUICK else pytest.mark.full) for plant in PLANTS]
)
def test_wrong_gradients_are_refused_before_the_first_step(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    (plant,) = [plant for plant in PLANTS if plant.name == name]
    first, second = gloo.run(2, train, str(tmp_path), name)
    assert first == second, "all ranks raise the same error"
    assert len(first) == 1 and not first[0].startswith("step")
    (dimension,) = [shown for key, shown in NAMES.items() if any(key in name for name in plant.mesh)]
    # Where only sums are wrong, the plugin of the transform that sums is named; a rule that cannot fit is found before.
    refused = (
        rf"^plugin '\w+' \(titan-\w+ [\d.]+\)(.*: |: )(layout of model 'tiny'|model 'tiny' on {dimension}).*{plant.says}"
    )
    assert re.search(refused, first[0]), first[0]
    assert first[0].endswith(" = 1") or "rules have Row()" in first[0], first[0]
    assert "receives" in first[0] or "cannot compute" in first[0] or "raised" in first[0] or "rules have Row()" in first[0]


def one_step(folder: str, after: bool, overrides: dict[str, object], tried: bool = True) -> RunRecord:
    """Train a step of a model whose regions compute after their sum, or of one with a mixer of its own."""
    model = small_gpt.definition(with_mlp(GainAfterSum), AFTER)
    if not after:
        model = small_gpt.definition(with_mean, with_means("right"))
    with pytest.MonkeyPatch.context() as patch:
        if not tried:
            patch.setattr("titan_core.model.build.try_division", lambda *_: None)
        return small_gpt.train_model(folder, model, {**BRIEF, "training.steps": 2, **overrides})


def test_a_region_that_computes_after_its_sum_trains_as_on_one_device(gloo: GlooPool, tmp_path: Path) -> None:
    """Its parameters once received twice their gradient, and its input too."""
    (one,) = gloo.run(1, one_step, str(tmp_path), True, {})
    for record in gloo.run(2, one_step, str(tmp_path), True, NO_SP):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)


@pytest.mark.parametrize(
    ("after", "overrides"),
    [(False, CP), pytest.param(False, FSDP, marks=pytest.mark.full), pytest.param(True, NO_SP, marks=pytest.mark.full)],
    ids=str,
)
def test_a_trial_leaves_no_trace(gloo: GlooPool, tmp_path: Path, after: bool, overrides: dict[str, object]) -> None:
    """Weights, losses and gradients of a run are bit for bit those of a run without a trial."""
    tried, untried = (gloo.run(2, one_step, str(tmp_path), after, overrides, tried)[0] for tried in (True, False))
    assert (tried.losses, tried.grad_norms) == (untried.losses, untried.grad_norms)
    for kind in ("initial", "gradients", "final"):
        found, expected = getattr(tried, kind), getattr(untried, kind)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
