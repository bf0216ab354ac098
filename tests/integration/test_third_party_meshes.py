"""Third-party dimensions and views of the mesh, whose names no package of Titan knows."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, make_job, run_recipe
from harness.third_party import TINY_LLAMA, install, train_with
from titan_core.api import Batch, Microbatch, UserError
from titan_core.api.parallel.microbatch import AuxiliaryLosses, microbatch_scope


@pytest.fixture(scope="module")
def zones(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zones")
    install(folder, "titan-zones")
    return str(folder)


SHORT: dict[str, object] = {**TINY_LLAMA, "training.steps": 3}


@pytest.fixture(scope="module")
def without_zones(gloo: GlooPool, zones: str, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """Train on one device."""
    ((record, _),) = gloo.run(1, train_with, zones, str(tmp_path_factory.mktemp("one")), "llama3_debug", SHORT)
    return record


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {}),
        pytest.param(4, {"data_parallel_shard": 2}, marks=pytest.mark.full),
        pytest.param(4, {"data_parallel_replicate": 2}, marks=pytest.mark.full),
        pytest.param(4, {"context_parallel": 2}, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tensor_parallel": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_dimension_that_divides_the_batch_trains_as_one_device(
    gloo: GlooPool, zones: str, without_zones: RunRecord, tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    mesh = {f"parallelism.{name}_degree": degree for name, degree in degrees.items()}
    many = gloo.run(ranks, train_with, zones, str(tmp_path), "llama3_debug", {**SHORT, "zones.count": 2, **mesh})
    for record, _ in many:
        assert record.losses == pytest.approx(without_zones.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(without_zones.grad_norms, rel=1e-5)
        assert len(record.rank_losses[0]) == 2 * degrees.get(
            "data_parallel_shard", degrees.get("data_parallel_replicate", 1)
        )


MOE: dict[str, object] = {
    "model.args": "{dim = 32, expert_dim = 24}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
}


EP, TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor", "pipeline", "context"))
NO_SP = "parallelism.disable_sequence_parallel"
REPLICATE = "parallelism.data_parallel_replicate_degree"


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, experts: str, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = str(tmp_path_factory.mktemp("one"))
    ((record, _),) = gloo.run(1, train_with, experts, folder, "moe", {**MOE, "training.steps": 6})
    return record


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {EP: 2}),
        pytest.param(4, {EP: 2}, marks=pytest.mark.full),  # x FSDP 2
        pytest.param(4, {EP: 2, PP: 2}, marks=pytest.mark.full),
        pytest.param(4, {EP: 2, TP: 2}, marks=pytest.mark.full),
        pytest.param(4, {EP: 2, TP: 2, "parallelism.disable_sequence_parallel": "true"}, marks=pytest.mark.full),
        (2, {EP: 2, CP: 2}),
        pytest.param(4, {EP: 2, REPLICATE: 2, "activation_checkpoint.mode": "full"}, marks=pytest.mark.full),
        pytest.param(4, {EP: 2, PP: 2, "activation_checkpoint.mode": "selective"}, marks=pytest.mark.full),
        pytest.param(2, {TP: 2}, marks=pytest.mark.full),
        pytest.param(8, {EP: 2, TP: 2, PP: 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_experts_divided_over_a_view_train_as_one_device(
    gloo: GlooPool, experts: str, one_device: RunRecord, tmp_path: Path, ranks: int, degrees: dict[str, object]
) -> None:
    for record, _ in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", {**MOE, **degrees}):
        assert record.losses == pytest.approx(one_device.losses[:4], rel=1e-6)
        assert record.grad_norms == pytest.approx(one_device.grad_norms[:4], rel=1e-6)
        assert record.statistics == one_device.statistics[:4]
    rows = one_device.statistics[0]["expert_rows"]
    assert [sum(layer) for layer in rows] == [8 * 32 * 2] * 2  # two experts for each token of the batch
    metrics = [json.loads(line) for line in (tmp_path / "outputs/moe/metrics.jsonl").read_text().splitlines()]
    busiest = max(max(layer) / (sum(layer) / len(layer)) for layer in rows)
    assert metrics[0]["expert_load/busiest"] == pytest.approx(busiest, rel=1e-12)


@pytest.mark.full
def test_experts_saved_on_one_mesh_resume_on_another(
    gloo: GlooPool, experts: str, one_device: RunRecord, tmp_path: Path
) -> None:
    saved = {**MOE, "training.steps": 6, "checkpoint.enable": "true"}
    for ranks, stop, expert in [(2, 2, 2), (1, 4, 1), (4, 6, 2)]:
        overrides = {**saved, "training.stop_at_step": stop, EP: expert}
        for record, _ in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", overrides):
            assert record.losses == pytest.approx(one_device.losses[stop - 2 : stop], rel=1e-6)
            assert record.grad_norms == pytest.approx(one_device.grad_norms[stop - 2 : stop], rel=1e-6)


def gradients_with(site: str, folder: str, overrides: dict[str, object]) -> RunRecord:
    """Train in this process; the record has the gradients of the first step."""
    os.chdir(folder)
    sys.path.insert(0, site)
    try:
        return run_recipe("moe", {"job.device": "cpu", **MOE, **overrides}, weights=True)
    finally:
        sys.path.remove(site)


@pytest.mark.full
def test_experts_divided_among_ranks_of_tensor_parallelism_learn_as_on_one_device(
    gloo: GlooPool, experts: str, one_device: RunRecord, tmp_path: Path
) -> None:
    """A view borrows the dimension, whose ranks hold different positions between regions."""
    (one,) = gloo.run(1, gradients_with, experts, str(tmp_path), {})
    for ranks, degree in [(4, 4), (2, 2), (4, 2)]:
        for record in gloo.run(ranks, gradients_with, experts, str(tmp_path), {EP: degree, TP: 2}):
            assert record.losses == pytest.approx(one_device.losses[:4], rel=1e-6)
            assert record.grad_norms == pytest.approx(one_device.grad_norms[:4], rel=1e-6)
            assert record.statistics == one_device.statistics[:4]
            assert record.gradients.keys() == one.gradients.keys()
            for name, gradient in record.gradients.items():
                expected = one.gradients[name]
                assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.full
def test_experts_are_not_held_again_by_each_rank_of_tensor_parallelism(gloo: GlooPool, experts: str, tmp_path: Path) -> None:
    name, settings = "blocks.0.feed_forward.experts.gate", {**MOE, "training.steps": 2}
    for degrees, ranks in [({EP: 4, TP: 2}, 4), ({EP: 2, TP: 2}, 2)]:
        for _, traced in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", {**settings, **degrees}, [name]):
            assert traced[name][0].numel() == 4 * 32 * 24 // ranks


@pytest.mark.full
def test_experts_divided_among_ranks_of_tensor_parallelism_resume_on_another_mesh(
    gloo: GlooPool, experts: str, one_device: RunRecord, tmp_path: Path
) -> None:
    saved = {**MOE, "training.steps": 6, "checkpoint.enable": "true"}
    for ranks, stop, degrees in [(4, 2, {EP: 4, TP: 2}), (2, 4, {EP: 2, TP: 2}), (4, 6, {EP: 2})]:
        overrides = {**saved, **degrees, "training.stop_at_step": stop}
        for record, _ in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", overrides):
            assert record.losses == pytest.approx(one_device.losses[stop - 2 : stop], rel=1e-6)
            assert record.grad_norms == pytest.approx(one_device.grad_norms[stop - 2 : stop], rel=1e-6)


def backwards(forward: Callable[..., torch.Tensor], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Call the experts in reverse order."""
    *pieces, unused = rows.split([*counts.tolist(), rows.shape[0] - int(counts.sum())])
    computed = forward(torch.cat(pieces[::-1]), counts.flip(0))
    return torch.cat([*computed.split(counts.flip(0).tolist())[::-1], unused])


def only_counted(forward: Callable[..., torch.Tensor], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Call the experts with rows that must all belong to one."""
    assert int(counts.sum()) == rows.shape[0], "rows without an expert"
    return forward(rows, counts)


BROKEN = {"backwards": backwards, "only counted": only_counted}


def refusal(site: str, recipe: str, overrides: dict[str, object], ranks: int, broken: str = "", region: str = "") -> str:
    """Return the error of a job on ``ranks`` ranks, which need not exist; ``broken`` says what to do to its experts,
    ``region`` names further regions of its model."""
    from titan_core.model.layout_trial import try_model

    sys.path.insert(0, site)
    try:
        job = make_job(recipe, {"job.device": "cpu", **overrides}, ranks)
        if region:
            layout = replace(job.model.layout, regions=(*job.model.layout.regions, region))
            job = replace(job, model=replace(job.model, layout=layout))
        with torch.device("meta"):
            model: Any = job.model.build()
        if broken:
            experts = model.blocks[0].feed_forward.experts
            whole = type(experts).forward
            changed = {"forward": lambda self, *rest: BROKEN[broken](functools.partial(whole, self), *rest)}
            experts.__class__ = type("Broken", (type(experts),), changed)
        try_model(model, job, cast(Any, None), torch.device("cpu"))
    except UserError as error:
        return str(error)
    finally:
        sys.path.remove(site)
    return ""


@pytest.mark.parametrize(
    ("recipe", "overrides", "ranks", "message"),
    [
        ("moe", {EP: 2}, 4, ""),
        (
            "llama3_debug",
            {EP: 2},
            2,
            "model 'llama3' has no experts that can be divided: no rule of its layout is Experts; set it to 1",
        ),
        (
            "moe",
            {EP: 8, "training.global_batch_size": 32},
            8,
            "= 8: must divide the 4 experts of 'blocks.0.feed_forward.experts'",
        ),
        (
            "moe",
            {EP: 3},
            4,
            "borrows (dp_shard 4 x cp 1 x tp 1); set parallelism.expert_parallel_degree = 1, 2 or 4",
        ),
        ("moe", {EP: 2, TP: 2}, 2, ""),
        ("moe", {EP: 4, TP: 2, NO_SP: "true"}, 4, "borrows (dp_shard 2 x cp 1); the 2 ranks of tp hold the same positions"),
    ],
)
def test_impossible_divisions_of_experts_are_refused(
    gloo: GlooPool, experts: str, recipe: str, overrides: dict[str, object], ranks: int, message: str
) -> None:
    (found,) = gloo.run(1, refusal, experts, recipe, overrides, ranks)
    assert message in found
    assert bool(message) == bool(found)


def test_experts_within_a_region_are_not_divided_among_ranks_with_the_same_positions(gloo: GlooPool, experts: str) -> None:
    (found,) = gloo.run(1, refusal, experts, "moe", {EP: 2, TP: 2}, 2, region="blocks.*.feed_forward")
    assert (
        "its ranks include those of tp, which hold the same positions in the region that 'blocks.0.feed_forward.exp" in found
    )


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("backwards", "module 'blocks.0.feed_forward' computes a different result"),
        ("only counted", "(AssertionError: rows without an expert"),
    ],
)
def test_experts_that_compute_a_different_result_when_divided_are_refused(
    gloo: GlooPool, experts: str, broken: str, why: str
) -> None:
    (found,) = gloo.run(1, refusal, experts, "moe", {EP: 2}, 2, broken=broken)
    assert "divided over 2 ranks, " in found and why in found


BALANCED = {**MOE, "expert_balance.weight": 0.5}


@pytest.fixture(scope="module")
def balanced(gloo: GlooPool, experts: str, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    ((record, _),) = gloo.run(1, train_with, experts, str(tmp_path_factory.mktemp("balanced")), "moe", BALANCED)
    return record


def test_a_balance_loss_is_reported_separately(one_device: RunRecord, balanced: RunRecord) -> None:
    assert balanced.losses[0] == one_device.losses[0]
    assert balanced.grad_norms[0] != pytest.approx(one_device.grad_norms[0], rel=1e-3)
    # The loss is 1 per block if experts are equally busy, as they nearly are at first, and never less.
    values = [step["expert_balance"] for step in balanced.auxiliary]
    assert values[0] == pytest.approx(0.5 * 2, rel=0.2)
    assert min(values) > 0.5 * 2 * 0.99


def balance_beside_plain_torch(site: str) -> list[torch.Tensor]:
    """Return the balance loss of one block, its expected value, the router's gradient and its expected value."""
    sys.path.insert(0, site)
    try:
        from titan_model_moe.balance import ExpertBalance
        from titan_model_moe.config import MoEArgs
        from titan_model_moe.model import FeedForward
    finally:
        sys.path.remove(site)
    torch.manual_seed(0)
    batch, seq, args = 3, 8, MoEArgs(dim=16, expert_dim=8)
    module: Any = FeedForward(args, layer=0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(batch, seq, args.dim)
    facts = SimpleNamespace(batch=SimpleNamespace(seq_len=seq), mesh=SimpleNamespace(dims=()))
    module.balance = ExpertBalance(cast(Any, SimpleNamespace(section=SimpleNamespace(weight=0.3), job=facts, mesh={})))
    losses = AuxiliaryLosses(1 / (batch * seq))
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    with microbatch_scope(Microbatch(Batch(tokens, tokens), 1, 0, losses)):
        (0.0 * module(x).sum()).backward()
    gradient = module.router.weight.grad
    probabilities = (x @ module.router.weight.T).softmax(-1)
    expected = torch.zeros(())
    for one in probabilities:  # a sequence
        busy = torch.stack([(one.topk(2).indices == expert).any(1).float().mean() / 2 for expert in range(4)])
        expected = expected + 0.3 * 4 * (busy * one.mean(0)).sum() / batch
    (expected_gradient,) = torch.autograd.grad(expected, module.router.weight)
    return [losses.values["expert_balance"], expected.detach(), gradient, expected_gradient]


def test_a_balance_loss_matches_the_formula(gloo: GlooPool, experts: str) -> None:
    ((value, expected, gradient, expected_gradient),) = gloo.run(1, balance_beside_plain_torch, experts)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {EP: 2}),
        (2, {PP: 2}),
        pytest.param(2, {CP: 2, "activation_checkpoint.mode": "full"}, marks=pytest.mark.full),
        pytest.param(4, {EP: 2, TP: 2}, marks=pytest.mark.full),
        pytest.param(2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_balance_loss_is_the_same_on_any_mesh(
    gloo: GlooPool, experts: str, balanced: RunRecord, tmp_path: Path, ranks: int, degrees: dict[str, object]
) -> None:
    for record, _ in gloo.run(ranks, train_with, experts, str(tmp_path), "moe", {**BALANCED, **degrees}):
        assert record.losses == pytest.approx(balanced.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(balanced.grad_norms, rel=1e-6)
        for step, expected in zip(record.auxiliary, balanced.auxiliary, strict=True):
            assert step == pytest.approx(expected, rel=1e-6)
