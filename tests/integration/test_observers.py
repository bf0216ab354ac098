"""Observation changes nothing: with every observer enabled at its highest frequency, on every kind of mesh, losses,
gradients and weights are bit for bit the same as without observers.

The full run tests the meshes in :data:`FAST`, and
``uv run pytest -m long tests/integration/test_observers.py`` all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import make_job
from harness.meshes import CASES, PP, SCHEDULE, TINY, Case, run_in
from titan_core.api import Observer

SETTINGS: dict[str, object] = {**TINY, "training.steps": 3, "training.global_batch_size": 8}
OBSERVED: dict[str, object] = {
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "true",
    "numerics.statistics_freq": 1,
    "profiling.enable_profiling": "true",
    "profiling.profile_freq": 1,
    "profiling.profiler_warmup": 0,
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.freq": 1,
    "validation.steps": 1,
    "checkpoint.enable": "true",
    "checkpoint.interval": 1,
    "checkpoint.async_mode": "async",
    "sample.enable": "true",
    "sample.freq": 1,
    "sample.max_new_tokens": 2,
}
NOT_HERE = {
    "memory_snapshots": "records the allocations of GPUs",
    "wandb": "starts a service of its own",
    "evaluation": "needs lm-eval: tests/integration/test_task_evaluation.py",
    "mlflow": "needs a server: tests/report/test_mlflow.py",
    "webhook": "needs a server: tests/report/test_webhook.py",
    "progress": "needs the launcher",
    "recovery": "needs a restart by the launcher",
    "stragglers": "compares several ranks",
}

MESHES = [
    *CASES,
    Case("PP 2, ZBVZeroBubble, offloaded", 2, {PP: 2, SCHEDULE: "ZBVZeroBubble", "training.enable_cpu_offload": "true"}),
    Case("PP 2, 1F1B, offloaded", 2, {PP: 2, "training.enable_cpu_offload": "true"}),
]
FAST = ("TP 2", "FSDP x PP", "PP 2, ZBVZeroBubble, offloaded")


def table() -> list[Any]:
    def marks(name: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.full] if name in FAST else [pytest.mark.long]

    return [pytest.param(case, id=case.name, marks=marks(case.name)) for case in MESHES]


def test_every_observer_takes_part() -> None:
    """Add new observers to :data:`OBSERVED`."""
    job = make_job("llama3_debug", {**SETTINGS, **OBSERVED}, world_size=1)
    taking_part = {one.name for one in job.observers}
    everyone = {one.name for one in job.registry.all(Observer)}
    assert everyone == taking_part | NOT_HERE.keys()


@pytest.mark.parametrize("case", table())
def test_an_observed_run_equals_an_unobserved_one_bit_for_bit(gloo: GlooPool, tmp_path: Path, case: Case) -> None:
    folders = [tmp_path / "plain", tmp_path / "observed"]
    for folder in folders:
        folder.mkdir()
    plain = gloo.run(case.ranks, run_in, str(folders[0]), {**SETTINGS, **case.overrides}, True, "llama3_debug")
    observed = gloo.run(
        case.ranks, run_in, str(folders[1]), {**SETTINGS, **case.overrides, **OBSERVED}, True, "llama3_debug"
    )
    for one, other in zip(plain, observed, strict=True):
        assert other.losses == one.losses
        assert other.grad_norms == one.grad_norms
        assert len(other.validation) == 3
        for before, after in ((one.gradients, other.gradients), (one.final, other.final)):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(list((folders[1] / "outputs/llama3_debug/debug/statistics").iterdir())) == case.ranks
