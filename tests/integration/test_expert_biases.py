"""Biases of the choice balance experts without a loss, and are the same to the bit on every mesh. The z-loss of routers is
the same to rounding.

``uv run pytest -m "long or full or not full" tests/integration/test_expert_biases.py`` runs the whole table: each mesh
with each recomputation, both dispatches and two accumulations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from harness.expert_biases import Biases, biases_of
from harness.quick import rows
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import CP, DR, FAST, PP, RECOMPUTATION, SCHEDULE, TP, require_equal

RECIPE, BIAS = "qwen3_moe_tiny", "choice.bias"
EP = "parallelism.expert_parallel_degree"
AC, LOCAL = "activation_checkpoint.mode", "training.local_batch_size"
ARGS = (
    "{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 100, n_experts = 8, experts_per_token = 2,"
    ' expert_dim = 32, n_dense_layers = 1, n_shared_experts = 1, scoring = "sigmoid", choice_bias = true}'
)
SETTINGS: dict[str, object] = {
    **FAST,
    "model.args": ARGS,
    "training.steps": 3,
    "training.global_batch_size": 16,
    "experts.balance": "bias",
    "experts.bias_rate": 0.01,
    "experts.z_loss_weight": 0.5,
}
VALIDATED: dict[str, object] = {
    "validation.enable": "true", "validation.dataset": "stdlib", "validation.freq": 1, "validation.steps": 1,
}  # fmt: skip
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "EP 2": (2, {EP: 2, **VALIDATED}),
    "EP 4": (4, {EP: 4}),
    "EP 2 x FSDP 2": (4, {EP: 2}),
    "EP 2 x HSDP 2": (4, {EP: 2, DR: 2}),
    "EP 2 x TP 2": (4, {EP: 2, TP: 2}),
    "EP 2 x TP 2, no SP": (4, {EP: 2, TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "EP 4 = FSDP 2 x TP 2": (4, {EP: 4, TP: 2}),
    "EP 2 x CP 2": (4, {EP: 2, CP: 2}),
    "EP 2 x PP 2, 1F1B": (4, {EP: 2, PP: 2, SCHEDULE: "1F1B"}),
    "EP 2 x PP 2, interleaved": (4, {EP: 2, PP: 2, SCHEDULE: "Interleaved1F1B"}),
    "EP 2 x PP 2, ZBV": (4, {EP: 2, PP: 2, SCHEDULE: "ZBVZeroBubble"}),
    "EP 2 x PP 2, DualPipeV": (4, {EP: 2, PP: 2, SCHEDULE: "DualPipeV"}),
    "EP 2 x TP 2 x PP 2": (8, {EP: 2, TP: 2, PP: 2}),
    "TP 2, no SP": (2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "CP 2": (2, {CP: 2}),
    "PP 2, ZBV": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble"}),
}
QUICK = ("CP 2, selective, alltoall, 4 microbatches",)
FULL = (
    "EP 2, full, alltoall, 1 microbatches",
    "EP 4, none, device, 4 microbatches",
    "EP 2 x TP 2, selective, alltoall, 1 microbatches",
    "EP 4 = FSDP 2 x TP 2, full, device, 1 microbatches",
    "EP 2 x PP 2, DualPipeV, full, device, 4 microbatches",
    "TP 2, no SP, none, alltoall, 1 microbatches",
    "PP 2, ZBV, none, alltoall, 4 microbatches",
)


def table() -> dict[str, tuple[int, dict[str, object]]]:
    """Return the ranks and the settings of each row."""
    found = {}
    for (mesh, (ranks, degrees)), mode, dispatch, microbatches in itertools.product(
        MESHES.items(), RECOMPUTATION, ("alltoall", "device"), (1, 4)
    ):
        data_ranks = ranks // math.prod(degrees.get(key, 1) for key in (TP, PP, CP))  # type: ignore[misc]
        name = f"{mesh}, {mode}, {dispatch}, {microbatches} microbatches"
        local: dict[str, object] = {LOCAL: 16 // data_ranks // microbatches, AC: mode}
        found[name] = ranks, {**degrees, **local, "parallelism.expert_parallel_dispatch": dispatch}
    return found


TABLE = table()


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Biases]:
    record, biases = gloo.run(1, biases_of, str(tmp_path_factory.mktemp("one")), RECIPE, SETTINGS, BIAS)[0]
    assert len(biases) == 3 and all(values[-1].any() for values in biases.values())
    return record, biases


@pytest.mark.parametrize("name", rows(TABLE, QUICK, FULL))
def test_a_mesh_trains_as_one_device_with_the_same_biases_to_the_bit(
    gloo: GlooPool, one_device: tuple[RunRecord, Biases], tmp_path: Path, name: str
) -> None:
    (one, biases), (ranks, overrides) = one_device, TABLE[name]
    found = gloo.run(ranks, biases_of, str(tmp_path), RECIPE, {**SETTINGS, **overrides}, BIAS)
    require_equal([record for record, _ in found], one)
    assert {bias for _, of_rank in found for bias in of_rank} == biases.keys()
    for bias, values in (pair for _, of_rank in found for pair in of_rank.items()):
        assert all(torch.equal(*pair) for pair in zip(values, biases[bias], strict=True)), bias


@pytest.mark.full
def test_biases_follow_the_rows_by_hand_and_are_saved(gloo: GlooPool, tmp_path: Path) -> None:
    ((record, biases),) = gloo.run(1, biases_of, str(tmp_path), RECIPE, SETTINGS, BIAS)
    expected = torch.zeros(8)
    for step, rows_of in enumerate(record.statistics):
        loads = torch.tensor(rows_of["experts_rows"][2]).double()
        expected += 0.01 * torch.sign(loads.mean() - loads).float()
        assert torch.equal(biases["layers.2.feed_forward.router.choice.bias"][step], expected)
    saved = {**SETTINGS, "checkpoint.enable": "true", "job.dump_folder": "saved"}
    gloo.run(2, biases_of, str(tmp_path), RECIPE, {**saved, "training.stop_at_step": 2, EP: 2}, BIAS)
    ((resumed, again),) = gloo.run(1, biases_of, str(tmp_path), RECIPE, saved, BIAS)
    assert resumed.losses == pytest.approx(record.losses[2:], rel=1e-6)
    for name, values in again.items():
        assert torch.equal(values[0], biases[name][2])


@pytest.mark.full
@pytest.mark.parametrize(
    ("balance", "least", "most"),
    [("none", 3.0, 8.0), ("bias", 1.0, 1.8), ("global", 1.0, 2.5)],
    ids=lambda value: str(value),
)
def test_experts_become_equally_busy(gloo: GlooPool, tmp_path: Path, balance: str, least: float, most: float) -> None:
    """In the last ten of 100 steps, the rows of the busiest expert are within these multiples of the mean (measured: 3.85,
    1.44 and 1.86; the most of two of eight experts is 4)."""
    settings = {**SETTINGS, "experts.balance": balance, "experts.bias_rate": 0.02, "experts.balance_weight": 1.0}
    settings |= {"optimizer.lr": 3e-3, "training.steps": 100, LOCAL: 16}
    settings |= {"lr_scheduler.min_lr_factor": 1.0, "experts.z_loss_weight": 0.0}
    ((record, _),) = gloo.run(1, biases_of, str(tmp_path), RECIPE, settings, BIAS)
    busiest = [max(max(one) * 8 / sum(one) for one in step["experts_rows"] if any(one)) for step in record.statistics]
    assert least < sum(busiest[-10:]) / 10 < most


@pytest.mark.full
def test_experts_can_be_chosen_by_turns(gloo: GlooPool, tmp_path: Path) -> None:
    settings = {**SETTINGS, "experts.balance": "none", "experts.force_balanced": "true", "training.steps": 1}
    ((record, _),) = gloo.run(1, biases_of, str(tmp_path), RECIPE, settings, BIAS)
    blocks = [rows_of for rows_of in record.statistics[0]["experts_rows"] if any(rows_of)]
    assert len(blocks) == 3 and all(len(set(rows_of)) == 1 for rows_of in blocks)
