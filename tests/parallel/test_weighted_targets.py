"""Documents may weight their tokens: on any mesh, the loss is the weighted mean over the global batch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.nn.functional as F

from harness import small_gpt
from harness.small_gpt import SmallGPT
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.training.batch import IGNORE
from titan_core.data.loader import data_loader
from titan_core.data.streams import OpenedData
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_job

BRIEF: dict[str, object] = {
    "training.dataset": "prompts", "training.dataset_path": "64", "training.steps": 3, "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 1, "data.document_mask": "true",
}  # fmt: skip


def job_of(overrides: dict[str, object], world_size: int) -> AssembledJob:
    return small_gpt.job_of(small_gpt.definition(), {**BRIEF, **overrides}, world_size)


def train(folder: str, overrides: dict[str, object]) -> RunRecord:
    os.chdir(folder)
    return run_job(job_of(overrides, int(os.environ["WORLD_SIZE"])), weights=True)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"parallelism.tensor_parallel_degree": 2},
        {"parallelism.pipeline_parallel_degree": 2, "objective.chunk_tokens": 5},
        pytest.param({"parallelism.context_parallel_degree": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_loss_is_the_weighted_mean(gloo: GlooPool, tmp_path: Path, overrides: dict[str, object]) -> None:
    (one,) = gloo.run(1, train, str(tmp_path), {})
    job = job_of({}, 1)
    loader = data_loader(job, OpenedData.of(job).training, 0)
    step = loader.next_step()
    loader.close()
    assert step is not None
    model, losses, weights = SmallGPT(), 0.0, 0.0
    model.load_state_dict(one.initial)
    for batch in step.microbatches:
        assert batch.weights is not None
        assert set(batch.weights[batch.targets != IGNORE].unique().tolist()) == {0.5, 1.0}
        logits = model(batch.tokens, batch.positions, batch.documents)
        each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none", ignore_index=IGNORE)
        losses += (each * batch.weights.flatten()).sum().item()
        weights += float(batch.weights[batch.targets != IGNORE].sum())
    assert step.target_weight == pytest.approx(weights)
    assert one.losses[0] == pytest.approx(losses / weights, rel=1e-6)
    for record in gloo.run(2, train, str(tmp_path), overrides):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert record.targets == one.targets


@pytest.mark.parametrize(
    ("flaw", "why"),
    [
        ("short", r"its weights have shape \(\d+,\), but it has \d+ tokens"),
        ("nan", "its weights must all be finite and at least 0"),
        ("-1", "its weights must all be finite and at least 0"),
    ],
)
def test_bad_weights_are_refused(in_tmp: Path, flaw: str, why: str) -> None:
    from titan_core.api import UserError

    job = job_of({"training.dataset_path": f"64:{flaw}"}, 1)
    with pytest.raises(UserError, match=rf"dataset 'prompts', logical shard \d of 4, document at .*: {why}"):
        run_job(replace(job))
