"""An objective of sums over documents has the loss of one device when ranks share the sequences; one that needs whole
sequences is refused then."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness import small_gpt
from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_job
from harness.small_gpt import SmallGPT
from titan_core.api import Batch, Objective, ObjectiveFunction, Ref, Vocabulary, add_metric
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.loader import data_loader
from titan_core.data.streams import OpenedData

BRIEF: dict[str, object] = {
    "training.dataset": "prompts", "training.dataset_path": "64", "training.steps": 3, "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 1, "data.document_mask": "true",
}  # fmt: skip


class OfDocuments(ObjectiveFunction):
    """The square of the weighted log-likelihood of each document, as far as it is in a sequence."""

    per_position, per_document = False, True
    metrics = ("longest",)

    def __init__(self, context: Any) -> None: ...

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        likelihood, _ = vocabulary.log_likelihood(logits, batch.targets)
        weights = batch.target_weights()
        both = torch.stack((torch.where(weights > 0, likelihood * weights, 0.0), weights), dim=-1)
        sums = batch.sum_documents(both)
        weight = sums[..., 1].sum(1)
        return add_metric(sums[..., 0].square().sum(), "longest", sums[..., 1].amax(1), (weight > 0).float())


class OfSequences(OfDocuments):
    per_document = False


def job_of(kind: str, overrides: dict[str, object], world_size: int) -> AssembledJob:
    job = small_gpt.job_of(small_gpt.definition(), {**BRIEF, **overrides}, world_size)
    build: Any = Ref(f"{__name__}:{kind}")
    return replace(job, objective=Objective(name="own", summary="", build=build, extras=()))


def train(folder: str, kind: str, overrides: dict[str, object]) -> RunRecord:
    os.chdir(folder)
    return run_job(job_of(kind, overrides, int(os.environ["WORLD_SIZE"])), weights=True)


@pytest.fixture(scope="module")
def one(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    (record,) = gloo.run(1, train, str(tmp_path_factory.mktemp("one")), "OfDocuments", {})
    return record


def test_one_device_computes_the_formula(one: RunRecord) -> None:
    job = job_of("OfDocuments", {}, 1)
    loader = data_loader(job, OpenedData.of(job).training, 0)
    step = loader.next_step()
    loader.close()
    assert step is not None
    model, total, weight, longest = SmallGPT(), 0.0, 0.0, []
    model.load_state_dict(one.initial)
    for batch in step.microbatches:
        assert batch.documents is not None
        weights = batch.target_weights()
        with torch.no_grad():
            logits = model(batch.tokens, batch.positions, batch.documents)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(weights)
        for row in range(len(weights)):
            documents = [batch.documents[row] == number for number in batch.documents[row].unique()]
            total += sum(float((losses * weights)[row][own].sum()) ** 2 for own in documents)
            longest.append(max(float(weights[row][own].sum()) for own in documents))
        weight += float(weights.sum())
    assert one.losses[0] == pytest.approx(total / weight, rel=1e-5)
    assert one.metrics[0]["longest"] == pytest.approx(sum(longest) / len(longest), rel=1e-6)


@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 2},
        pytest.param({"tensor": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_mesh_trains_as_one_device(gloo: GlooPool, one: RunRecord, tmp_path: Path, degrees: dict[str, int]) -> None:
    mesh: dict[str, object] = {f"parallelism.{name}_parallel_degree": degree for name, degree in degrees.items()}
    for record in gloo.run(2, train, str(tmp_path), "OfDocuments", mesh):
        assert record.losses == pytest.approx(one.losses, rel=2e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
        for found, expected in zip(record.metrics, one.metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-9)


def test_an_objective_of_whole_sequences_is_refused(gloo: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match="needs all positions of a sequence together, and context parallelism divides them"
    ):
        gloo.run(2, train, str(tmp_path), "OfSequences", {"parallelism.context_parallel_degree": 2})
