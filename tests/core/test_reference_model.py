"""A reference model computes with weights of its own for each batch, and takes no part in the run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from harness import small_gpt
from harness.small_gpt import LAYOUT, SmallGPT
from titan_core.api import Batch, Objective, ObjectiveFunction, Ref, UserError, Vocabulary, add_metric, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.loader import data_loader
from titan_core.data.streams import OpenedData
from titan_core.job.reference_model import reference_config, require_reference
from titan_testing.jobs import TINY, make_job, run_job

BRIEF: dict[str, object] = {
    "training.dataset": "letters",
    "training.dataset_path": ",".join(map(str, range(20, 60))),
    "training.steps": 3,
    "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 1,
    "objective.chunk_tokens": 10,
}


class Distance(ObjectiveFunction):
    """The squared distance of the logits from those of the reference model."""

    metrics = ("frozen",)

    def __init__(self, context: Any) -> None: ...

    def of_reference(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Mapping[str, Tensor]:
        assert not torch.is_grad_enabled()
        return {"logits": logits}

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        frozen = batch.extras["logits"].tensor
        loss = (logits - frozen).square().sum()
        return add_metric(loss, "frozen", frozen.mean(-1), torch.ones_like(frozen[..., 0]))


class Short(Distance):
    def of_reference(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Mapping[str, Tensor]:
        return {"logits": logits[:, 1:]}


def job_with(kind: str) -> AssembledJob:
    """Return a job whose reference model has the weights of another seed."""
    job = small_gpt.job_of(small_gpt.definition(), BRIEF, 1)
    build: Any = Ref(f"{__name__}:{kind}")
    job = replace(job, objective=Objective(name="distance", summary="", build=build, reference=Ref("harness:unused")))
    return replace(job, reference=replace(job, config=job.config.changed({"training.seed": 5})))


def weights_of(seed: int) -> dict[str, Tensor]:
    job = small_gpt.job_of(small_gpt.definition(), {**BRIEF, "training.steps": 1, "training.seed": seed}, 1)
    return run_job(job, weights=True).initial


class Repeats:
    """Repeats the forward pass of each step, as debuggers do."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.names: set[str] = set()

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.names = {name for part in run.state.parts for name, _ in part.module.named_parameters()}

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        self.losses.append(float(update.repeat_forward()))


def test_the_results_of_the_reference_model_reach_the_objective(in_tmp: Path) -> None:
    job, observer = job_with("Distance"), Repeats()
    record = run_job(job, weights=True, observers=[observer])
    ours, theirs = SmallGPT(), SmallGPT()
    ours.load_state_dict(record.initial)
    theirs.load_state_dict(weights_of(5))
    loader = data_loader(job, OpenedData.of(job).training, 0)
    step = loader.next_step()
    loader.close()
    assert step is not None and len(step.microbatches) == 2
    with torch.no_grad():
        pairs = [(ours(batch.tokens), theirs(batch.tokens)) for batch in step.microbatches]
    distance = sum(float((a - b).square().sum()) for a, b in pairs)
    assert record.losses[0] == pytest.approx(distance / step.target_weight, rel=1e-5)
    mean = torch.cat([b for _, b in pairs]).mean().item()
    assert record.metrics[0]["frozen"] == pytest.approx(mean, rel=1e-5)
    assert observer.losses[0] == pytest.approx(distance, rel=1e-5)
    assert observer.names == set(dict(SmallGPT().named_parameters()))
    assert record.losses[2] < record.losses[0]


def test_results_that_are_not_per_position_are_refused(in_tmp: Path) -> None:
    with pytest.raises(
        UserError, match=r"of_reference returned 'logits' of shape \[2, \d, 288\] for tokens of shape \[2, \d\]"
    ):
        run_job(job_with("Short"))


def test_a_reference_model_with_another_vocabulary_is_refused() -> None:
    job = small_gpt.job_of(small_gpt.definition(), BRIEF, 1)
    other = replace(job, model=replace(job.model, layout=replace(LAYOUT, vocab_size=300, max_seq_len=8)))
    with pytest.raises(UserError) as caught:
        require_reference(job, other)
    assert [problem.why for problem in caught.value.problems] == [
        "has a vocabulary of 300 tokens, and the trained model one of 288",
        "accepts at most 8 tokens, and training.seq_len is 16",
    ]


def test_the_keys_of_a_reference_model_replace_those_of_the_trained_one() -> None:
    job = make_job("tiny", {**TINY, "model.tokenizer": "byte"}, 1)
    assert reference_config(job.config, {}, job.registry).value("model.args") == job.config.value("model.args")  # type: ignore[arg-type]
    other = reference_config(job.config, {"model.name": "noisy", "model.flavor": "tiny"}, job.registry)  # type: ignore[arg-type]
    assert (other.value("model.name"), other.value("model.args"), other.value("model.tokenizer")) == ("noisy", {}, "byte")
    with pytest.raises(UserError, match=r"model\.colour"):
        reference_config(job.config, {"model.colour": "red"}, job.registry)  # type: ignore[arg-type]


class Ordered(Distance):
    """Keeps the order in which the models compute."""

    order: ClassVar[list[str]] = []

    def of_reference(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Mapping[str, Tensor]:
        self.order.append("frozen")
        return super().of_reference(logits, batch, vocabulary)

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        self.order.append("trained")
        return super().__call__(logits, batch, vocabulary)


def test_results_are_computed_microbatch_by_microbatch(in_tmp: Path) -> None:
    """Memory holds the results of one microbatch, not those of the step."""
    Ordered.order.clear()
    job = job_with("Ordered")
    assert job.batch.microbatches == 2
    run_job(replace(job, config=job.config.changed({"training.steps": 1})))
    assert [kind for kind, _ in itertools.groupby(Ordered.order)] == ["frozen", "trained"] * 2


def test_its_forward_pass_and_its_weights_are_counted() -> None:
    job = job_with("Distance")
    assert job.reference is not None
    alone = replace(job, reference=None)
    assert job.flops_per_token == pytest.approx(alone.flops_per_token * 4 / 3)
    assert alone.flops_per_token == job.model.flops_per_token(job.batch.seq_len)
