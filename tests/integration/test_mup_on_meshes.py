"""muP of titan-optim on meshes: weights, rates and losses are those of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.meshes import DR, PP, TP
from harness.quick import rows
from harness.resuming import run_in

SETTINGS: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 48}",
    "optimizer.name": "MuAdamW",
    "mup.base": "{dim = 8, n_heads = 1, n_kv_heads = 1, ffn_dim = 16}",
    "training.steps": 4,
    "training.local_batch_size": 4,
    "checkpoint.enable": "false",
}


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, run_in, str(tmp_path_factory.mktemp("one")), SETTINGS)[0]


MESHES: dict[str, dict[str, object]] = {"fsdp": {}, "ddp": {DR: 2}, "tp": {TP: 2}, "pp": {PP: 2}}


@pytest.mark.parametrize("mesh", rows(MESHES, {"tp"}))
def test_every_mesh_has_the_losses_of_one_device(gloo: GlooPool, one_device: RunRecord, tmp_path: Path, mesh: str) -> None:
    records = gloo.run(2, run_in, str(tmp_path), {**SETTINGS, **MESHES[mesh]})
    for record in records:
        assert record.losses == pytest.approx(one_device.losses, rel=1e-5)
        for name, tensor in record.initial.items():
            assert tensor.equal(one_device.initial[name]), name
        for name, tensor in record.final.items():
            torch.testing.assert_close(tensor, one_device.final[name], rtol=1e-3, atol=1e-4)
