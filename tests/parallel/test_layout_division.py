"""Unusual but correct layouts train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor, nn

from harness import small_gpt
from harness.odd_gpts import APART, OWN, PositionsApart, own_parameters
from harness.small_gpt import DIM, LAYOUT, SmallGPT
from harness.unusual_gpts import JOINT, UNFUSED, WHOLE, fused, joint_norms, scaled_and_capped, unfused
from titan_core.api import Constant, ModelLayout, Normal
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord

TP, PP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline"))
CHUNKED = {"objective.chunk_tokens": 24}
NO_SP = {"parallelism.disable_sequence_parallel": "true"}
BRIEF: dict[str, object] = {"training.steps": 3, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
# Biases are not 0, so that one added on every rank would change the first loss.
VALUES = {"*norm*.weight": Constant(1.0), "*": Normal(0.1)}


class NormedEmbedding(SmallGPT):
    """A model whose embedding is a chain of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_norm = nn.LayerNorm(DIM)

    def embedded(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.embedding_norm(super().embedded(tokens, positions))


MODELS: dict[str, tuple[Callable[[], object], ModelLayout]] = {
    "plain": (SmallGPT, LAYOUT),
    "chain": (NormedEmbedding, replace(LAYOUT, embedding=("embedding", "embedding_norm"))),
    "own": (own_parameters, OWN),
    "joint norms": (joint_norms, JOINT),
    "whole": (fused, WHOLE),
    "unfused": (unfused, UNFUSED),
    "scaled": (scaled_and_capped, replace(LAYOUT, tied={"output.weight": "embedding.token.weight"})),
    "apart": (PositionsApart, APART),
}


def train(folder: str, name: str, overrides: dict[str, object]) -> RunRecord:
    build, layout = MODELS[name]
    model = small_gpt.definition(build, replace(layout, parameters=VALUES))
    return small_gpt.train_model(folder, model, {**BRIEF, **overrides})


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunRecord]:
    return cache(lambda name: gloo.run(1, train, str(tmp_path_factory.mktemp(name)), name, {})[0])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("plain", {TP: 2}, marks=pytest.mark.full),
        ("plain", {TP: 2, **NO_SP}),
        ("chain", {TP: 2}),
        pytest.param("chain", {TP: 2, **NO_SP}, marks=pytest.mark.full),
        ("chain", {PP: 2}),
        ("joint norms", {TP: 2}),
        pytest.param("joint norms", {TP: 2, **NO_SP}, marks=pytest.mark.full),
        pytest.param("joint norms", {TP: 2, "activation_checkpoint.mode": "selective"}, marks=pytest.mark.full),
        pytest.param(
            "joint norms", {TP: 2, "compile.enable": "true", "compile.backend": "aot_eager"}, marks=pytest.mark.full
        ),
        ("whole", {TP: 2}),
        pytest.param("whole", {TP: 2, **NO_SP}, marks=pytest.mark.full),
        pytest.param("unfused", {TP: 2}, marks=pytest.mark.full),
        ("scaled", {TP: 2, **CHUNKED}),
        pytest.param("scaled", {TP: 2, "parallelism.disable_loss_parallel": "true"}, marks=pytest.mark.full),
        pytest.param("scaled", {PP: 2, **CHUNKED}, marks=pytest.mark.full),
        ("own", {TP: 2}),
        pytest.param("own", {TP: 2, **NO_SP}, marks=pytest.mark.full),
        pytest.param("apart", {}, marks=pytest.mark.full),
        ("apart", {"parallelism.context_parallel_degree": 2}),
    ],
    ids=str,
)
def test_unusual_layouts_train_as_on_one_device(
    gloo: GlooPool, one_device: Callable[[str], RunRecord], tmp_path: Path, name: str, overrides: dict[str, object]
) -> None:
    """Covers norms inside a region, where each rank has different heads, row-sharded biases, and grouped heads."""
    one = one_device(name)
    records = gloo.run(2, train, str(tmp_path), name, overrides)
    gradients = {key: value for record in records for key, value in record.gradients.items()}
    assert set(gradients) == set(one.gradients)
    for record in records:
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
    total = sum(float(one.gradients[key].norm()) for key in gradients)
    for key, gradient in gradients.items():
        assert float((gradient - one.gradients[key]).norm()) <= 1e-5 * total, key
