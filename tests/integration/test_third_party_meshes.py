"""Dimensions and views of the mesh that third parties bring: no package of ours knows their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.gloo_pool import GlooPool
from harness.third_party import TINY_LLAMA, install, train_with


@pytest.fixture(scope="module")
def zones(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zones")
    install(folder, "titan-zones")
    return str(folder)


SHORT: dict[str, object] = {**TINY_LLAMA, "training.steps": 3}


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {}),
        (4, {"data_parallel_shard": 2}),
        (4, {"data_parallel_replicate": 2}),
        (4, {"context_parallel": 2}),
        (4, {"pipeline_parallel": 2}),
        (4, {"tensor_parallel": 2}),
    ],
    ids=str,
)
def test_a_dimension_that_divides_the_batch_trains_as_one_device(
    gloo: GlooPool, zones: str, tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    mesh = {f"parallelism.{name}_degree": degree for name, degree in degrees.items()}
    ((one, _),) = gloo.run(1, train_with, zones, str(tmp_path), "llama3_debug", SHORT)
    many = gloo.run(ranks, train_with, zones, str(tmp_path), "llama3_debug", {**SHORT, "zones.count": 2, **mesh})
    for record, _ in many:
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert len(record.rank_losses[0]) == 2 * degrees.get(
            "data_parallel_shard", degrees.get("data_parallel_replicate", 1)
        )


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("experts")
    install(folder, "titan-model-moe", "titan-expert-parallel")
    return str(folder)


MOE: dict[str, object] = {
    "model.args": "{dim = 32, expert_dim = 24}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
}


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {"expert": 2}),
        (4, {"expert": 2}),
        (4, {"expert": 4}),
        (4, {"expert": 2, "pipeline": 2}),
        (4, {"expert": 2, "tensor": 2}),
        (2, {"tensor": 2}),
        (2, {"expert": 2, "context": 2}),
        (4, {"expert": 2, "data_replicate": 2}),
    ],
    ids=str,
)
def test_experts_divided_over_a_view_train_as_one_device(
    gloo: GlooPool, experts: str, tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    mesh = {f"parallelism.{name}_parallel_degree": degree for name, degree in degrees.items()}
    mesh = {name.replace("data_replicate_parallel", "data_parallel_replicate"): degree for name, degree in mesh.items()}
    ((one, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", MOE)
    for record, _ in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", {**MOE, **mesh}):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)
