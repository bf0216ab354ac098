"""A run resumes from a checkpoint as if it had not stopped, on any mesh: see ``tests/ckpt/test_resume.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.odd_optimizers import train_in
from harness.resuming import run_in

TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
DR = "parallelism.data_parallel_replicate_degree"


@pytest.fixture(scope="module")
def uninterrupted(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, run_in, str(tmp_path_factory.mktemp("whole")), {})[0]


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        pytest.param(4, {TP: 2}, marks=pytest.mark.full),
        pytest.param(2, {PP: 2, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}, marks=pytest.mark.full),
        pytest.param(2, {CP: 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_on_the_same_mesh_it_is_bit_for_bit_the_same(
    gloo: GlooPool, tmp_path: Path, ranks: int, mesh: dict[str, object]
) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    for folder in folders:
        os.mkdir(folder)
    whole = gloo.run(ranks, run_in, folders[0], mesh)
    first = gloo.run(ranks, run_in, folders[1], {**mesh, "training.stop_at_step": 5})
    second = gloo.run(ranks, run_in, folders[1], mesh)
    assert first[0].reason == "training.stop_at_step was reached"
    for one, a, b in zip(whole, first, second, strict=True):
        assert a.losses + b.losses == one.losses
        assert a.grad_norms + b.grad_norms == one.grad_norms
        assert all(torch.equal(b.final[name], tensor) for name, tensor in one.final.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, {TP: 2}), (4, {}), marks=pytest.mark.full),
        ((2, {PP: 2}), (1, {})),
        pytest.param((1, {}), (4, {TP: 2, PP: 2}), marks=pytest.mark.full),
        pytest.param((4, {DR: 2}), (4, {CP: 2}), marks=pytest.mark.full),
        pytest.param(
            (2, {PP: 2, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}), (2, {TP: 2}), marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_on_another_mesh_it_resumes_to_rounding(
    gloo: GlooPool, uninterrupted: RunRecord, tmp_path: Path, before: tuple[int, Any], after: tuple[int, Any]
) -> None:
    gloo.run(before[0], run_in, str(tmp_path), {**before[1], "training.stop_at_step": 4})
    records = gloo.run(after[0], run_in, str(tmp_path), after[1])
    for record in records:
        assert record.losses == pytest.approx(uninterrupted.losses[4:], rel=1e-5)
        assert record.grad_norms == pytest.approx(uninterrupted.grad_norms[4:], rel=1e-4)
    final = {name: tensor for record in records for name, tensor in record.final.items()}
    for name, tensor in uninterrupted.final.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {PP: 2}), (1, {})),
        pytest.param(
            (2, {PP: 2, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}), (4, {TP: 2}), marks=pytest.mark.full
        ),
        pytest.param((2, {}), (4, {TP: 2, PP: 2}), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_parameters_tied_across_stages_are_one_in_a_checkpoint(
    gloo: GlooPool, tmp_path: Path, before: tuple[int, Any], after: tuple[int, Any]
) -> None:
    tied = {"model.args.tie_embeddings": "true"}
    (whole,) = gloo.run(1, run_in, str(tmp_path), {**tied, "job.dump_folder": "whole"})
    gloo.run(before[0], run_in, str(tmp_path), {**tied, **before[1], "training.stop_at_step": 4})
    manifest = (tmp_path / "outputs/tiny/checkpoint/step-4/checkpoint.json").read_text()
    assert "tok_embeddings.weight" in manifest
    assert "output.weight" not in manifest
    records = gloo.run(after[0], run_in, str(tmp_path), {**tied, **after[1]})
    for record in records:
        assert record.losses == pytest.approx(whole.losses[4:], rel=1e-6)
        assert record.grad_norms == pytest.approx(whole.grad_norms[4:], rel=1e-5)
    final = {name: tensor for record in records for name, tensor in record.final.items()}
    assert final.keys() == whole.final.keys()
    for name, tensor in whole.final.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [((2, {PP: 2}), (2, {}))], ids=str)
def test_an_optimizers_state_is_restored_on_another_mesh(
    gloo: GlooPool, tmp_path: Path, before: tuple[int, Any], after: tuple[int, Any]
) -> None:
    (whole,) = gloo.run(1, train_in, str(tmp_path), {"job.dump_folder": "whole"})
    gloo.run(before[0], train_in, str(tmp_path), {**before[1], "training.stop_at_step": 3})
    second = gloo.run(after[0], train_in, str(tmp_path), after[1])[0]
    assert second.losses == pytest.approx(whole.losses[3:], rel=1e-5)
    for name, tensor in whole.final.items():
        torch.testing.assert_close(second.final[name], tensor, rtol=1e-3, atol=1e-5)
