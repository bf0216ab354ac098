"""A third-party objective is minimised on every mesh, though its plugin knows nothing about meshes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.third_party import EXAMPLES, TINY_LLAMA, install, train_with
from titan_core.api import Batch, Vocabulary
from titan_core.api.training.batch import IGNORE

Z_LOSS: dict[str, object] = {
    **TINY_LLAMA,
    "training.steps": 3,
    "objective.name": "next_token_z_loss",
    "z_loss.coefficient": 0.05,
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.freq": 2,
    "validation.steps": 1,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("z_loss")
    install(folder, "titan-objective-z-loss")
    return str(folder)


@pytest.fixture(scope="module")
def one(gloo: GlooPool, site: str, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """Train on one device."""
    folder = str(tmp_path_factory.mktemp("one"))
    ((record, _),) = gloo.run(1, train_with, site, folder, "llama3_debug", Z_LOSS)
    ((plain, _),) = gloo.run(1, train_with, site, folder, "llama3_debug", {**Z_LOSS, "z_loss.coefficient": 0.0})
    penalties = [0.05 * step["normaliser"] for step in record.metrics]
    assert record.losses[0] - plain.losses[0] == pytest.approx(penalties[0], rel=1e-5)
    assert record.losses[0] > 1.1 * plain.losses[0]
    assert record.validation[2][0] > 1.1 * plain.validation[2][0]
    return record


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, {"parallelism.tensor_parallel_degree": 2, "objective.chunk_tokens": 20}),
        pytest.param(
            2, {"parallelism.tensor_parallel_degree": 2, "parallelism.disable_loss_parallel": "true"}, marks=pytest.mark.full
        ),
        (2, {"parallelism.pipeline_parallel_degree": 2, "objective.chunk_tokens": 7}),
        pytest.param(2, {"parallelism.context_parallel_degree": 2, "objective.chunk_tokens": 30}, marks=pytest.mark.full),
        pytest.param(
            4, {"parallelism.tensor_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 2}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_it_trains_as_on_one_device(
    gloo: GlooPool, site: str, one: RunRecord, tmp_path: Path, ranks: int, more: dict[str, object]
) -> None:
    for record, _ in gloo.run(ranks, train_with, site, str(tmp_path), "llama3_debug", {**Z_LOSS, **more}):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert record.validation[2][0] == pytest.approx(one.validation[2][0], rel=1e-6)
        for found, expected in zip(record.metrics, one.metrics, strict=True):
            assert found == {"normaliser": pytest.approx(expected["normaliser"], rel=1e-6)}
        assert record.validation_metrics[2] == pytest.approx(one.validation_metrics[2], rel=1e-6)


def test_it_matches_the_formula_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "titan-objective-z-loss" / "src"))
    monkeypatch.delitem(sys.modules, "titan_objective_z_loss", raising=False)
    from titan_objective_z_loss.objective import NextTokenWithZLoss  # type: ignore[import-not-found, unused-ignore]

    context: Any = SimpleNamespace(section=SimpleNamespace(coefficient=0.3))
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, 6, IGNORE, 2, 3], [1, 1, 5, IGNORE, 4]])
    loss = NextTokenWithZLoss(context)(logits, Batch(targets, targets), Vocabulary())
    penalty = 0.3 * logits.logsumexp(-1).square()[targets != IGNORE].sum()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") + penalty
    torch.testing.assert_close(loss, expected)
