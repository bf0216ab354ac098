"""Titan's own models, optimizers and observers pass the suites that third parties inherit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from harness.quick import quick_rows
from titan_core.api import Observer
from titan_testing.jobs import make_job
from titan_testing.meshes import CASES, PP, SCHEDULE, Case
from titan_testing.suites import ModelSuite, ObserverSuite, OptimizerSuite

MESHES = (
    "DDP 2", "FSDP 2", "HSDP 2x2", "TP 2", "TP 2, no SP", "PP 2, 1F1B", "PP 2, ZBVZeroBubble", "CP 2", "CP 2 by heads",
    "FSDP x TP", "FSDP x PP", "TP x CP",
)  # fmt: skip
SMALL: dict[str, Any] = {"dim": 48, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 100}


@pytest.mark.quick_rows(2)
class TestTiny(ModelSuite):
    model = "tiny"
    args: ClassVar = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64}


@pytest.mark.full
class TestLlama(ModelSuite):
    model = "llama3"
    flavor = "debug"
    args: ClassVar = SMALL
    meshes = MESHES


@pytest.mark.full
class TestQwen3(ModelSuite):
    """The heads together are wider than the hidden states, as in the small published sizes."""

    model = "qwen3"
    flavor = "debug"
    args: ClassVar = SMALL
    meshes = MESHES


@pytest.mark.full
class TestTiedQwen3(ModelSuite):
    model = "qwen3"
    flavor = "debug"
    args: ClassVar = {**SMALL, "tie_embeddings": True}
    meshes = ("PP 2, 1F1B", "FSDP x TP")


@pytest.mark.full
class TestQwen3MoE(ModelSuite):
    model = "qwen3_moe"
    flavor = "debug"
    args: ClassVar = {**SMALL, "n_experts": 4, "expert_dim": 32}
    meshes = MESHES


@pytest.mark.full
class TestDeepSeekExperts(ModelSuite):
    """The experts of DeepSeek-V3, which the class of transformers for Qwen3 does not have."""

    model = "qwen3_moe"
    flavor = "debug"
    args: ClassVar = {
        **SMALL, "n_experts": 4, "expert_dim": 32, "n_dense_layers": 1, "n_shared_experts": 1, "scoring": "sigmoid",
        "choice_bias": True, "n_groups": 2, "n_chosen_groups": 2, "weight_scale": 1.5,
    }  # fmt: skip
    meshes = MESHES
    unsupported: ClassVar = {"weight formats": "n_shared_experts: is 1, and Qwen3MoeForCausalLM has 0"}


@pytest.mark.quick_rows(1)
class TestAdamW(OptimizerSuite):
    optimizer = "AdamW"


ODD: dict[str, object] = {"model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 50}"}
"""Rows of the feed-forward matrices do not divide by 4."""


@pytest.mark.quick_rows(1)
class TestMuon(OptimizerSuite):
    optimizer = "Muon"
    settings: ClassVar = {**ODD, "muon.dtype": "float32"}
    meshes = (
        "DDP 2", "FSDP 2", "FSDP 4", "HSDP 2x2", "TP 2", "PP 2, 1F1B", "FSDP x TP", "FSDP x PP", "FSDP x CP",
        "FSDP x TP x CP",
    )  # fmt: skip
    loss = 5e-5  # of the elements of weights: AdamW's too are divided by the root of their small squares
    weights = 1e-5


@pytest.mark.quick_rows(1)
class TestMuAdamW(OptimizerSuite):
    optimizer = "MuAdamW"
    settings: ClassVar = {**ODD, "mup.base": "{dim = 8, n_heads = 1, n_kv_heads = 1, ffn_dim = 16}"}
    meshes = ("FSDP 2", "DDP 2", "TP 2", "PP 2, 1F1B")
    loss = 5e-5
    weights = 1e-5


@pytest.mark.full
class TestAdamWBF16(OptimizerSuite):
    """Gradients differ in their last bits between meshes, so that a few elements of the state may be rounded otherwise."""

    optimizer = "AdamWBF16"
    settings: ClassVar = {**ODD, "optimizer.lr": 2e-3}
    meshes = ("FSDP 2", "TP 2", "PP 2, 1F1B", "FSDP x TP")
    loss = 1e-4


OBSERVED: dict[str, object] = {
    "metrics.log_freq": 1, "metrics.enable_tensorboard": "true", "numerics.statistics_freq": 1,
    "numerics.record_weights": "true", "profiling.enable_profiling": "true", "profiling.profile_freq": 1,
    "profiling.profiler_warmup": 0,
    "validation.enable": "true", "validation.dataset": "stdlib", "validation.freq": 1, "validation.steps": 1,
    "checkpoint.enable": "true", "checkpoint.interval": 1, "checkpoint.async_mode": "async",
    "sample.enable": "true", "sample.freq": 1, "sample.max_new_tokens": 2,
}  # fmt: skip
NOT_HERE = {
    "memory_snapshots": "records the allocations of GPUs",
    "wandb": "starts a service of its own",
    "evaluation": "needs lm-eval: tests/integration/test_task_evaluation.py",
    "mlflow": "needs a server: tests/report/test_mlflow.py",
    "webhook": "needs a server: tests/report/test_webhook.py",
    "progress": "needs the launcher",
    "recovery": "needs a restart by the launcher",
    "stragglers": "compares several ranks",
    "replicas": "compares several ranks, also in runs that are not observed",
    "device_check": "compares several ranks: tests/integration/test_device_check.py",
}
OFFLOADED = [
    Case(f"PP 2, {schedule}, offloaded", 2, {PP: 2, SCHEDULE: schedule, "training.enable_cpu_offload": "true"})
    for schedule in ("ZBVZeroBubble", "1F1B")
]


class TestAllObservers(ObserverSuite):
    """Each at its highest frequency. ``pytest -m long tests/integration/test_inherited_suites.py`` tries all meshes."""

    settings: ClassVar = {"model.args": "{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 100}"}
    switched_on: ClassVar = OBSERVED

    def rows(self, test: str) -> Mapping[str, Any]:
        full = ("TP 2", "FSDP x PP", "PP 2, ZBVZeroBubble, offloaded")
        cases = [pytest.param(one, id=one.name) for one in (*CASES, *OFFLOADED)]
        return {str(one.id): one for one in quick_rows(cases, [], full)}

    def test_every_observer_takes_part(self) -> None:
        """Add new ones to :data:`OBSERVED`."""
        job = make_job(self.recipe, {**self.job(), **OBSERVED}, world_size=1)
        assert {one.name for one in job.registry.all(Observer)} == {one.name for one in job.observers} | NOT_HERE.keys()

    def require_seen(self, run: Path) -> None:
        assert len([*(run / "debug/statistics").iterdir()]) == 1 and [*(run / "checkpoint").iterdir()]
        assert (run / "metrics.jsonl").read_text().count('"validation') >= 3
