"""A run resumes from a checkpoint as if it had not stopped, on any mesh: see ``tests/ckpt/test_resume.py``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.odd_optimizers import train_in
from harness.quick import rows
from harness.resuming import run_in
from harness.small_gpt import small, train_model
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import CP, DR, PP, SCHEDULE, TP

MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "FSDP 2": (2, {}),
    "FSDP 4": (4, {}),
    "HSDP": (4, {DR: 2}),
    "TP 2": (2, {TP: 2}),
    "FSDP x TP": (4, {TP: 2}),
    "PP 2": (2, {PP: 2}),
    "PP 2, Interleaved1F1B": (2, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    "PP 2, ZBVZeroBubble": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble"}),
    "TP x PP": (4, {TP: 2, PP: 2}),
    "CP 2": (2, {CP: 2}),
    "FSDP x CP": (4, {CP: 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["FSDP x TP", "PP 2, Interleaved1F1B", "CP 2"])
def test_on_the_same_mesh_it_is_bit_for_bit_the_same(gloo: GlooPool, tmp_path: Path, mesh: str) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    for folder in folders:
        os.mkdir(folder)
    ranks, degrees = MESHES[mesh]
    whole = gloo.run(ranks, run_in, folders[0], degrees)
    first = gloo.run(ranks, run_in, folders[1], {**degrees, "training.stop_at_step": 5})
    second = gloo.run(ranks, run_in, folders[1], degrees)
    assert first[0].reason == "training.stop_at_step was reached"
    for one, a, b in zip(whole, first, second, strict=True):
        assert a.losses + b.losses == one.losses
        assert a.grad_norms + b.grad_norms == one.grad_norms
        assert all(torch.equal(b.final[name], tensor) for name, tensor in one.final.items())


@pytest.fixture(scope="module")
def uninterrupted(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunRecord]:
    """Return a function that returns the run on one device, by whether the embedding is tied."""

    def run(tied: str) -> RunRecord:
        return gloo.run(1, run_in, str(tmp_path_factory.mktemp("whole")), {"model.args.tie_embeddings": tied})[0]

    return functools.cache(run)


RESUMED = [
    "FSDP x TP to FSDP 4", "PP 2 to one device", "one device to TP x PP", "HSDP to FSDP x CP", "PP 2, ZBVZeroBubble to TP 2",
    "tied: PP 2 to one device", "tied: PP 2, ZBVZeroBubble to FSDP x TP", "tied: FSDP 2 to TP x PP",
]  # fmt: skip


@pytest.mark.parametrize("row", rows(RESUMED, ["PP 2 to one device", "tied: PP 2 to one device"]))
def test_on_another_mesh_it_resumes_to_rounding(
    gloo: GlooPool, uninterrupted: Callable[[str], RunRecord], tmp_path: Path, row: str
) -> None:
    tied = "true" if row.startswith("tied: ") else "false"
    whole, settings = uninterrupted(tied), {"model.args.tie_embeddings": tied}
    (ranks, before), (others, after) = (MESHES[mesh] for mesh in row.removeprefix("tied: ").split(" to "))
    gloo.run(ranks, run_in, str(tmp_path), {**settings, **before, "training.stop_at_step": 4})
    manifest = (tmp_path / "outputs/tiny/checkpoint/step-4/checkpoint.json").read_text()
    assert "tok_embeddings.weight" in manifest
    assert ("output.weight" in manifest) == (tied == "false")  # parameters tied across stages are one in a checkpoint
    records = gloo.run(others, run_in, str(tmp_path), {**settings, **after})
    for record in records:
        assert record.losses == pytest.approx(whole.losses[4:], rel=1e-6)
        assert record.grad_norms == pytest.approx(whole.grad_norms[4:], rel=1e-5)
    final = {name: tensor for record in records for name, tensor in record.final.items()}
    assert final.keys() == whole.final.keys()
    for name, tensor in whole.final.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_an_optimizers_state_is_restored_on_another_mesh(gloo: GlooPool, tmp_path: Path) -> None:
    (whole,) = gloo.run(1, train_in, str(tmp_path), {"job.dump_folder": "whole"})
    gloo.run(2, train_in, str(tmp_path), {PP: 2, "training.stop_at_step": 3})
    second = gloo.run(2, train_in, str(tmp_path), {})[0]
    assert second.losses == pytest.approx(whole.losses[3:], rel=1e-5)
    for name, tensor in whole.final.items():
        torch.testing.assert_close(second.final[name], tensor, rtol=1e-3, atol=1e-5)


def train_exact(folder: str, overrides: dict[str, object]) -> RunRecord:
    """Train a model in bfloat16, some of whose parameters compute in fp32."""
    brief = {"training.steps": 2, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
    brief |= {"training.mixed_precision_param": "bfloat16", "checkpoint.enable": "true", "checkpoint.interval": 1}
    return train_model(folder, small(gains=True), {**brief, "job.dump_folder": "run", **overrides})


@pytest.mark.full
def test_parameters_that_compute_in_fp32_resume_on_another_mesh(gloo: GlooPool, tmp_path: Path) -> None:
    stopped, _ = gloo.run(2, train_exact, str(tmp_path), {"training.stop_at_step": 1})
    (resumed,) = gloo.run(1, train_exact, str(tmp_path), {})
    assert stopped.final.keys() == resumed.initial.keys()
    for name, tensor in stopped.final.items():
        assert tensor.dtype == torch.float32 and torch.equal(resumed.initial[name], tensor), name
