"""Local SGD in islands, a parallelism of a third party, whose ranks hold different weights between synchronisations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.third_party import TINY_LLAMA, train_with
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import TP

pytestmark = pytest.mark.full
ISLANDS: dict[str, object] = {**TINY_LLAMA, "local_sgd.islands": 2, "local_sgd.sync_every": 3}
WEIGHT = "layers.0.attention.wq.weight"
Results = list[tuple[RunRecord, list[torch.Tensor]]]
Train = Callable[[int, dict[str, object]], Results]


@pytest.fixture
def train(gloo: GlooPool, site_of: Callable[[str], str], tmp_path: Path) -> Train:
    """Return a function that trains, and returns each rank's record and, of islands, its weight after each step."""

    def train(ranks: int, overrides: dict[str, object]) -> Results:
        given = site_of("titan-local-sgd"), str(tmp_path), "llama3_debug", overrides, [WEIGHT] if ranks > 1 else []
        return [(record, weights.get(WEIGHT, [])) for record, weights in gloo.run(ranks, train_with, *given)]

    return train


def test_weights_of_islands_meet_when_they_synchronise(train: Train) -> None:
    (record, here), (_, there) = train(2, ISLANDS)
    assert [torch.equal(*pair) for pair in zip(here, there, strict=True)] == [False, False, True, False, False, True]
    assert record.losses[-1] < record.losses[0]
    # Tensor parallelism within each island changes nothing.
    for other, _ in train(4, {**ISLANDS, TP: 2}):
        assert other.losses == pytest.approx(record.losses, rel=1e-5)


def test_islands_with_the_same_data_train_as_one_device(train: Train, tmp_path: Path) -> None:
    """Each island then has the gradients, gradient norm and loss of one device, not half or twice as much."""
    line = json.dumps({"text": "the same words again and again, " * 40})
    (tmp_path / "same.jsonl").write_text((line + "\n") * 64)
    same = {**TINY_LLAMA, "training.dataset": "json", "training.dataset_path": "same.jsonl"}
    ((one, _),) = train(1, same)
    mean = {"local_sgd.islands": 2, "local_sgd.sync_every": 2, "local_sgd.outer_lr": 1.0, "local_sgd.outer_momentum": 0.0}
    for record, _ in train(2, {**same, **mean}):
        assert record.losses == pytest.approx(one.losses, rel=1e-5)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


@pytest.mark.parametrize("stop", [4, 6])
def test_islands_resume_bit_for_bit(train: Train, stop: int) -> None:
    """Both between synchronisations, when the islands' weights differ, and after one: the outer momentum is saved too."""
    islands = {**ISLANDS, "training.steps": 9}
    saved = {**islands, "checkpoint.enable": "true", "checkpoint.async_mode": "async", "job.dump_folder": "run"}
    whole = train(2, {**islands, "job.dump_folder": "whole"})
    train(2, {**saved, "training.stop_at_step": stop})
    for (one, weights), (other, resumed) in zip(whole, train(2, saved), strict=True):
        assert other.losses == one.losses[stop:]
        assert all(torch.equal(*pair) for pair in zip(weights[stop:], resumed, strict=True))


def test_weights_of_islands_start_another_run_only_if_they_are_equal(train: Train) -> None:
    islands = {**ISLANDS, "checkpoint.enable": "true", "checkpoint.interval": 1, "job.dump_folder": "run"}
    train(2, {**islands, "training.steps": 5, "training.stop_at_step": 4})
    alone = {**TINY_LLAMA, "training.steps": 1, "checkpoint.enable": "true", "job.dump_folder": "alone"}
    with pytest.raises(RuntimeError, match=r"step-4: its 2 replicas have different weights in model\."):
        train(1, {**alone, "checkpoint.initial_load_path": "run/checkpoint/step-4"})
    ((record, _),) = train(1, {**alone, "checkpoint.initial_load_path": "run/checkpoint/step-3"})
    assert record.losses
    # A run with one replica cannot resume a run with two, whatever allow_changed says.
    one = {**islands, "training.steps": 4, "local_sgd.islands": 1, "checkpoint.allow_changed": '["*"]'}
    with pytest.raises(RuntimeError, match="it contains 2 diverging replicas of the model, but this job trains 1"):
        train(2, one)
