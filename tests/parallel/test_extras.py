"""Extra tensors that a dataset fills reach the model and the objective on any mesh, divided with the tokens."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import small_gpt
from harness.small_gpt import DIM, LAYOUT, VOCAB, Embedding, SmallGPT
from titan_core.api import Batch, Objective, ObjectiveFunction, Ref, TrainingContext, Vocabulary, add_metric
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.loader import data_loader
from titan_core.data.streams import OpenedData
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_job

BRIEF: dict[str, object] = {
    "training.dataset": "tagged", "training.dataset_path": "64", "training.steps": 3, "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 1, "data.document_mask": "true", "validation.enable": "true",
    "validation.dataset": "tagged", "validation.dataset_path": "9", "validation.freq": 3,
}  # fmt: skip


class TaggedEmbedding(Embedding):
    """Adds an embedding of the first tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tag = nn.Embedding(8, DIM)

    def forward(self, tokens: Tensor, positions: Tensor | None, tags: Tensor | None = None) -> Tensor:
        assert tags is not None
        return super().forward(tokens, positions) + self.tag(tags[..., 0] % 8)


class TaggedGPT(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = TaggedEmbedding()

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, tags: Tensor | None = None
    ) -> Tensor:
        h = self.embedding(tokens, positions, tags)
        for block in self.blocks:
            h = block(h, documents)
        return self.output(self.norm(h))


class Scored(ObjectiveFunction):
    """Cross entropy times a function of the score of each position."""

    metrics = ("score",)

    def __init__(self, context: TrainingContext[Any]) -> None: ...

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        likelihood, _ = vocabulary.log_likelihood(logits, batch.targets)
        weights, score = batch.target_weights(), batch.extras["score"].tensor
        loss = -torch.where(weights > 0, likelihood * (2.0 + score) * weights, 0.0).sum()
        return add_metric(loss, "score", score, weights)


def job_of(overrides: dict[str, object], world_size: int) -> AssembledJob:
    layout = replace(LAYOUT, inputs=("tags",))
    job = small_gpt.job_of(small_gpt.definition(TaggedGPT, layout), {**BRIEF, **overrides}, world_size)
    scored: Any = Ref(f"{__name__}:Scored")
    return replace(job, objective=Objective(name="scored", summary="", build=scored, extras=("score",)))


def train(folder: str, overrides: dict[str, object]) -> RunRecord:
    os.chdir(folder)
    return run_job(job_of(overrides, int(os.environ["WORLD_SIZE"])), weights=True)


@pytest.fixture(scope="module")
def one(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    (record,) = gloo.run(1, train, str(tmp_path_factory.mktemp("one")), {})
    return record


def test_one_device_computes_the_formula(one: RunRecord) -> None:
    job = job_of({}, 1)
    loader = data_loader(job, OpenedData.of(job).training, 0)
    step = loader.next_step()
    loader.close()
    assert step is not None
    model, total, weight, scores = TaggedGPT(), 0.0, 0.0, 0.0
    model.load_state_dict(one.initial)
    for batch in step.microbatches:
        score, weights = batch.extras["score"].tensor, batch.target_weights()
        logits = model(batch.tokens, batch.positions, batch.documents, batch.extras["tags"].tensor)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(weights)
        total += float((losses.detach() * weights * (2.0 + score)).sum())
        weight, scores = weight + float(weights.sum()), scores + float((weights * score).sum())
    assert one.losses[0] == pytest.approx(total / weight, rel=1e-6)
    assert one.metrics[0]["score"] == pytest.approx(scores / weight, rel=1e-6)
    assert logits.shape[-1] == VOCAB


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"parallelism.data_parallel_shard_degree": 2}, marks=pytest.mark.full),
        pytest.param({"parallelism.tensor_parallel_degree": 2, "objective.chunk_tokens": 5}, marks=pytest.mark.full),
        {"parallelism.pipeline_parallel_degree": 2, "objective.chunk_tokens": 5},
        {"parallelism.context_parallel_degree": 2},
    ],
    ids=str,
)
def test_a_mesh_trains_as_one_device(gloo: GlooPool, one: RunRecord, tmp_path: Path, overrides: dict[str, object]) -> None:
    for record in gloo.run(2, train, str(tmp_path), overrides):
        assert record.losses == pytest.approx(one.losses, rel=2e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
        assert record.validation[3] == pytest.approx(one.validation[3], rel=2e-6)
        for found, expected in zip(record.metrics, one.metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-9)
        assert record.validation_metrics[3] == pytest.approx(one.validation_metrics[3], rel=1e-9)
