"""Metrics of an objective are means over the global batch, counted once whatever is recomputed, chunked or accumulated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.small_gpt import LAYOUT, VOCAB, SmallGPT
from titan_core.api import Batch, ModelPart, ObjectiveFunction, StepInput, Vocabulary, add_metric
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.api.training.batch import IGNORE
from titan_core.loop.losses import MetricMeans
from titan_core.loop.world import join_world
from titan_core.model.loss_head import attach
from titan_core.model.next_token import NextToken
from titan_core.model.preserved import repeat_backward, repeat_forward
from titan_testing.gloo_pool import GlooPool


class Measured(NextToken):
    """Reports how often the target is the most likely token, and the mean target of each sequence."""

    metrics = ("accuracy", "mean_target")

    def __init__(self, per_position: bool = True) -> None:
        self.per_position = per_position

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        loss = super().__call__(logits, batch, vocabulary)
        right = logits.argmax(-1) == batch.targets
        loss = add_metric(loss, "accuracy", right, batch.target_weights())
        if self.per_position:
            return loss
        trained = batch.targets != IGNORE
        means = torch.where(trained, batch.targets, 0).sum(1) / trained.sum(1)
        return add_metric(loss, "mean_target", means, trained.any(1).float())


def data() -> Batch:
    """Four sequences, of which the last has no target."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (4, 16), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[1, 4:9] = targets[3] = IGNORE
    return Batch(tokens, targets, weights=torch.rand(4, 16, generator=generator) + 0.5)


def part_with(objective: ObjectiveFunction, chunk_tokens: int) -> ModelPart:
    torch.manual_seed(0)
    part = ModelPart(SmallGPT(), LAYOUT, objective)
    attach(part, chunk_tokens)
    return part


def expected() -> tuple[float, float]:
    torch.manual_seed(0)
    batch, logits = data(), SmallGPT()(data().tokens)
    weights = batch.target_weights().double()
    accuracy = ((logits.argmax(-1) == batch.targets) * weights).sum() / weights.sum()
    rows = [[target for target in row if target != IGNORE] for row in batch.targets.tolist()]
    means = [sum(row) / len(row) for row in rows if row]
    return accuracy.item(), sum(means) / len(means)


def mean(metrics: MetricSums, name: str) -> float:
    total, weight = metrics.values[name].tolist()
    return float(total / weight)


@pytest.mark.parametrize("chunk_tokens", [64, 6])
@pytest.mark.parametrize("local", [4, 2])
def test_a_metric_is_a_mean_over_the_batch(local: int, chunk_tokens: int) -> None:
    part, metrics = part_with(Measured(), chunk_tokens), MetricSums()
    GradientAccumulation(part)(StepInput(data().split(local), 1, 0, 5.0, metrics=metrics))
    assert mean(metrics, "accuracy") == pytest.approx(expected()[0], rel=1e-12)
    weight = data().target_weights().double().sum().item()
    assert metrics.values["accuracy"][1].item() == pytest.approx(weight, rel=1e-12)  # counted once


@pytest.mark.parametrize("local", [4, 2])
def test_a_metric_may_be_a_mean_over_sequences(local: int) -> None:
    part, metrics = part_with(Measured(per_position=False), 6), MetricSums()
    GradientAccumulation(part)(StepInput(data().split(local), 1, 0, 5.0, metrics=metrics))
    assert metrics.values["mean_target"][1].item() == 3.0
    assert mean(metrics, "mean_target") == pytest.approx(expected()[1], rel=1e-6)


def test_chunks_that_are_recomputed_count_once() -> None:
    """A microbatch whose predecessor awaits its backward pass recomputes its chunks."""
    part, metrics = part_with(Measured(), 6), MetricSums()
    inputs = StepInput(data().split(2), 1, 0, 5.0, metrics=metrics)
    losses = [part.forward_loss(microbatch) for microbatch in inputs.microbatches()]
    assert metrics.values["accuracy"][1] < data().target_weights().sum()  # only the first has computed its gradients
    for loss in losses:
        loss.backward()
    assert mean(metrics, "accuracy") == pytest.approx(expected()[0], rel=1e-12)


def test_evaluations_count_and_repeated_passes_do_not() -> None:
    part, metrics = part_with(Measured(), 6), MetricSums()
    run, inputs = GradientAccumulation(part), StepInput(data().split(2), 1, 0, 1.0, metrics=metrics)
    run.evaluate(inputs)
    assert mean(metrics, "accuracy") == pytest.approx(expected()[0], rel=1e-12)
    before = metrics.values["accuracy"].clone()
    repeat_forward(run, inputs, [part])
    with repeat_backward(run, replace(inputs, auxiliary=AuxiliaryLosses(1.0)), [part]):
        pass
    assert torch.equal(metrics.values["accuracy"], before)
    loss = torch.ones(())
    assert add_metric(loss, "accuracy", loss, loss) is loss  # outside a step


def test_weights_of_zero_hide_values_that_are_not_finite() -> None:
    part, metrics = part_with(NextToken(), 64), MetricSums()
    with part.computing(StepInput([data()], 1, 0, metrics=metrics).microbatches()[0]):
        loss = torch.ones((), requires_grad=True)
        add_metric(loss, "x", torch.tensor([math.nan, 3.0]), torch.tensor([0.0, 2.0])).backward()
    assert metrics.values["x"].tolist() == [6.0, 2.0]


def means_of_ranks(size: int) -> dict[str, float]:
    from titan_testing.jobs import TINY, make_job

    with join_world(make_job("tiny", {**TINY, "parallelism.data_parallel_shard_degree": size}, size)) as world:
        means = MetricMeans(world, [part_with(Measured(), 64)])
        metrics = MetricSums({"accuracy": torch.tensor([1.0, 2.0 + world.rank], dtype=torch.float64)})
        return {name: value.item() for name, value in means(metrics).items()}


def test_the_weights_of_ranks_may_differ(gloo: GlooPool) -> None:
    for found in gloo.run(2, means_of_ranks, 2):
        assert found["accuracy"] == 2.0 / 5.0
        assert math.isnan(found["mean_target"])  # no rank has a weight


def test_a_name_that_is_not_declared_is_refused() -> None:
    metrics = MetricSums({"speed": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(RuntimeError, match="the objective reports metric 'speed', which its `metrics` do not name"):
        of_one_rank(NextToken())(metrics)


def of_one_rank(objective: ObjectiveFunction) -> MetricMeans:
    class One:
        device = torch.device("cpu")

        def is_first_along(self, *names: str) -> bool:
            return True

        def gather(self, value: Any) -> list[Any]:
            return [value]

    world: Any = One()
    return MetricMeans(world, [ModelPart(nn.Linear(1, 1), LAYOUT, objective)])
