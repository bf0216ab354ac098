"""AdamW with bfloat16 state on meshes, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.meshes import PP, TP, run_in

SETTINGS: dict[str, object] = {
    "optimizer.name": "AdamWBF16",
    "optimizer.lr": 2e-3,
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 50}",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
}


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = str(tmp_path_factory.mktemp("one"))
    return gloo.run(1, run_in, folder, SETTINGS, True, "llama3_debug")[0]


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, {}),
        pytest.param(2, {TP: 2}, marks=pytest.mark.full),
        pytest.param(2, {PP: 2}, marks=pytest.mark.full),
        pytest.param(4, {TP: 2}, marks=pytest.mark.full),
    ],
    ids=["FSDP 2", "TP 2", "PP 2", "FSDP 2 x TP 2"],
)
def test_a_mesh_trains_as_one_device(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path, ranks: int, mesh: dict[str, object]
) -> None:
    """Gradients differ in their last bits between meshes, so that a few elements of the state may be rounded otherwise."""
    for record in gloo.run(ranks, run_in, str(tmp_path), {**SETTINGS, **mesh}, True, "llama3_debug"):
        assert record.losses == pytest.approx(one_device.losses, rel=1e-6)
        for name, tensor in record.final.items():
            expected = one_device.final[name]
            assert (tensor - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.full
def test_it_resumes_bit_for_bit_and_on_another_mesh(gloo: GlooPool, tmp_path: Path) -> None:
    def run(ranks: int, **more: object) -> list[RunRecord]:
        return gloo.run(ranks, run_in, str(tmp_path), {**SETTINGS, "job.dump_folder": "run", **more}, True, "llama3_debug")

    whole = run(2, **{"job.dump_folder": "whole"})
    saved = {"checkpoint.enable": "true"}
    run(2, **saved, **{"training.stop_at_step": 2})
    for one, other in zip(whole, run(2, **saved), strict=True):
        assert other.losses == one.losses[2:]
        assert all(torch.equal(one.final[name], tensor) for name, tensor in other.final.items())
    for ranks, degrees in ((1, {}), (4, {TP: 2})):
        for record in run(ranks, **saved, **degrees, **{"checkpoint.load_step": 2}):
            assert record.losses == pytest.approx(whole[0].losses[2:], rel=1e-6)
