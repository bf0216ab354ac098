"""Experts are kept equally busy with the same losses, rows and biases on every mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.quick import rows
from harness.third_party import train_with
from titan_testing.gloo_pool import GlooPool
from titan_testing.meshes import require_equal

EP, TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor", "pipeline", "context"))
REPLICATE, AC, LOCAL = (
    "parallelism.data_parallel_replicate_degree",
    "activation_checkpoint.mode",
    "training.local_batch_size",
)
MOE: dict[str, object] = {
    "model.args": "{dim = 32, expert_dim = 24}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
}
BALANCE = {"experts.balance_weight": 0.5, "experts.balance": "global"}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "one microbatch": (1, {LOCAL: 8}),
    "8 microbatches": (1, {LOCAL: 1}),
    "EP 2": (2, {EP: 2}),
    "EP 4": (4, {EP: 4}),
    "HSDP 2 x EP 2, recomputed": (4, {EP: 2, REPLICATE: 2, AC: "full"}),
    "TP 2": (2, {TP: 2, AC: "selective"}),
    "TP 2, no SP": (2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "CP 2": (2, {CP: 2}),
    "PP 2": (2, {PP: 2}),
    "PP 2, ZBV, recomputed": (2, {PP: 2, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble", AC: "full", LOCAL: 4,
                                  "model.args": "{dim = 32, expert_dim = 24, n_layers = 4}"}),
}  # fmt: skip
QUICK = ("8 microbatches", "EP 2")


@pytest.mark.parametrize("kind", [pytest.param("sequence", marks=pytest.mark.full), "global"])
@pytest.mark.parametrize("mesh", rows(MESHES, QUICK, tuple(MESHES)))
def test_a_loss_is_the_same_on_every_mesh(gloo: GlooPool, experts: str, tmp_path: Path, mesh: str, kind: str) -> None:
    """Also for every number of microbatches and under pipelines, as the "global" losses of Megatron-LM (its issues 3672,
    5047 and 5996) and TorchTitan (its pull request 3000 refuses both) are not."""
    ranks, overrides = MESHES[mesh]
    settings = {**MOE, **BALANCE, "experts.balance": kind, **overrides}
    alone = {
        key: value for key, value in settings.items() if not key.startswith(("parallelism", "activation")) and key != LOCAL
    }
    ((one, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", {**alone, LOCAL: 2})
    assert one.auxiliary[0]["expert_balance"] == pytest.approx(0.5 * len(one.statistics[0]["experts_rows"]), rel=0.2)
    found = gloo.run(ranks, train_with, experts, str(tmp_path), "moe", settings)
    require_equal([record for record, _ in found], one, 1e-6)


@pytest.mark.full
def test_the_loss_of_sequences_is_that_of_the_example(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    """Which is tested against the formula."""
    settings = {**MOE, "experts.balance_weight": 0.5, "experts.balance": "sequence"}
    ((ours, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", settings)
    ((theirs, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", {**MOE, "expert_balance.weight": 0.5})
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)
    assert ours.auxiliary[-1] == pytest.approx(theirs.auxiliary[-1], rel=1e-6)


@pytest.mark.full
def test_the_first_step_of_a_loss_of_the_previous_batch_has_no_gradient(
    gloo: GlooPool, experts: str, tmp_path: Path
) -> None:
    ((one, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", {**MOE, **BALANCE})
    ((none, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", MOE)
    assert one.auxiliary[0]["expert_balance"] == pytest.approx(0.5 * 2, rel=1e-6)
    assert one.grad_norms[0] == pytest.approx(none.grad_norms[0], rel=1e-6)
    assert one.grad_norms[1] != pytest.approx(none.grad_norms[1], rel=1e-4)


@pytest.mark.full
def test_the_loss_of_the_previous_batch_resumes_on_another_mesh(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    settings = {**MOE, **BALANCE, "training.steps": 6}
    ((one, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", {**settings, "job.dump_folder": "whole"})
    saved = {**settings, "checkpoint.enable": "true"}
    for ranks, stop, expert in [(2, 2, 2), (1, 4, 1), (4, 6, 2)]:
        overrides = {**saved, "training.stop_at_step": stop, EP: expert}
        for record, _ in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", overrides):
            assert record.losses == pytest.approx(one.losses[stop - 2 : stop], rel=1e-6)
            assert [step["expert_balance"] for step in record.auxiliary] == pytest.approx(
                [step["expert_balance"] for step in one.auxiliary[stop - 2 : stop]], rel=1e-6
            )


def test_metrics_say_how_busy_experts_are(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    ((record, _),) = gloo.run(1, train_with, experts, str(tmp_path), "moe", {**MOE, "training.steps": 1})
    (line,) = (tmp_path / "outputs/moe/metrics.jsonl").read_text().splitlines()
    found, loads = json.loads(line), record.statistics[0]["experts_rows"]
    assert found["experts/busiest"] == pytest.approx(max(max(one) / (sum(one) / len(one)) for one in loads))
    assert found["experts/unused"] == 0
    assert 0.9 < found["experts/entropy"] <= 1.0
    (logged,) = map(json.loads, (tmp_path / "outputs/moe/debug/expert_rows.jsonl").read_text().splitlines())
    assert logged == {"step": 1, "rows": loads}
    off = {**MOE, "training.steps": 1, "experts.metrics": "false", "job.dump_folder": "off"}
    gloo.run(1, train_with, experts, str(tmp_path), "moe", off)
    assert "experts/busiest" not in (tmp_path / "off/metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"experts.balance": "bias"},
            r"router 'blocks\.0\.feed_forward\.router' has no bias: it has no buffer 'choice\.bias'; set it to \"sequence\"",
        ),
        ({"experts.force_balanced": "true"}, r"router 'blocks\.0\.feed_forward\.router' has no module `choice`"),
    ],
)
def test_what_a_router_lacks_is_said(
    gloo: GlooPool, experts: str, tmp_path: Path, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        gloo.run(1, train_with, experts, str(tmp_path), "moe", {**MOE, **overrides})


def test_a_model_without_experts_is_not_balanced(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="model 'llama3' has no experts to balance: its layout names no routers"):
        gloo.run(1, train_with, experts, str(tmp_path), "llama3_debug", {"experts.balance": "global"})
