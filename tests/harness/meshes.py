"""The meshes that must train like one device, and the comparison of a run with one on one device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from harness.jobs import RunRecord, run_recipe

WHOLE: dict[str, object] = {"training.steps": 20, "job.device": "cpu"}
TINY: dict[str, object] = {
    **WHOLE,
    "model.args": "{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 100}",
    "training.seq_len": 48,
    "training.local_batch_size": 2,
    "training.global_batch_size": 16,
    "lr_scheduler.warmup_steps": 5,
}
FAST: dict[str, object] = {
    **TINY,
    "training.steps": 6,
    "training.global_batch_size": 8,
    "lr_scheduler.warmup_steps": 3,
}
SETTINGS = {"whole": WHOLE, "tiny": TINY, "fast": FAST}
RECOMPUTATION = ("none", "full", "selective")
DR = "parallelism.data_parallel_replicate_degree"
TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
HEADS = "parallelism.context_parallel_heads_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"


@dataclass(frozen=True)
class Case:
    """A row of the table. FSDP uses the ranks that no degree takes."""

    name: str
    ranks: int
    overrides: dict[str, object]
    fast: tuple[str, ...] = ()
    """The recomputation modes with which it is part of every test run."""
    tiny: bool = False
    """Whether to use the smaller model even in the long run."""


CASES = [
    Case("DDP 2", 2, {DR: 2}, fast=("none",)),
    Case("FSDP 2", 2, {}, fast=("none", "selective")),
    Case("FSDP 4", 4, {}, fast=("none",)),
    Case("HSDP 2x2", 4, {DR: 2}, fast=("none",)),
    Case("TP 2", 2, {TP: 2}, fast=("none", "selective")),
    Case("TP 2, no SP", 2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}, fast=("none",)),
    Case("TP 2, no loss parallelism", 2, {TP: 2, "parallelism.disable_loss_parallel": "true"}, fast=("none",)),
    Case("PP 2, GPipe", 2, {PP: 2, SCHEDULE: "GPipe"}, fast=("none",)),
    Case("PP 2, 1F1B", 2, {PP: 2, SCHEDULE: "1F1B"}, fast=("none",)),
    Case("PP 2, LoopedBFS", 2, {PP: 2, SCHEDULE: "LoopedBFS"}, fast=("none",)),
    Case("PP 2, Interleaved1F1B", 2, {PP: 2, SCHEDULE: "Interleaved1F1B"}, fast=("full",)),
    Case("PP 2, InterleavedZeroBubble", 2, {PP: 2, SCHEDULE: "InterleavedZeroBubble"}, fast=("selective",)),
    Case("PP 2, ZBVZeroBubble", 2, {PP: 2, SCHEDULE: "ZBVZeroBubble"}, fast=("selective",)),
    Case("PP 2, DualPipeV", 2, {PP: 2, SCHEDULE: "DualPipeV"}, fast=("full",)),
    Case("CP 2", 2, {CP: 2}, fast=("none", "full")),
    Case("CP 2 by heads", 2, {CP: 2, HEADS: 2}, fast=("none", "full", "selective")),
    Case("CP 4 by heads", 4, {CP: 4, HEADS: 4}, fast=("none",)),
    Case("CP 2x2 by rings and heads", 4, {CP: 4, HEADS: 2}, fast=("selective",)),
    Case("FSDP x TP", 4, {TP: 2}, fast=("full",)),
    Case("FSDP x PP", 4, {PP: 2}, fast=("none",)),
    Case("TP x PP", 4, {TP: 2, PP: 2}),
    Case("FSDP x CP", 4, {CP: 2}, fast=("none",)),
    Case("TP x CP", 4, {TP: 2, CP: 2}, fast=("selective",)),
    Case("TP x CP by heads", 4, {TP: 2, CP: 2, HEADS: 2}, fast=("selective",)),
    Case("PP x CP by heads", 4, {PP: 2, CP: 2, HEADS: 2}, fast=("none",)),
    Case("FSDP x TP x PP", 8, {TP: 2, PP: 2}),
    Case("FSDP x TP x CP", 8, {TP: 2, CP: 2}),
    Case("HSDP x CP", 8, {DR: 2, CP: 2}),
    Case("FSDP x TP x PP x CP", 16, {TP: 2, PP: 2, CP: 2}, tiny=True),
]


def run_in(folder: str, overrides: dict[str, object], weights: bool = True, recipe: str = "tiny") -> RunRecord:
    os.chdir(folder)
    return run_recipe(recipe, overrides, weights=weights)


def require_equal(records: list[RunRecord], one: RunRecord) -> None:
    """Assert that a run on a mesh equals one on one device: losses within 1e-5, gradient norms within 1e-4, initial weights
    bit for bit, and each gradient of the first step within 1e-5."""
    initial, gradients, final = {}, {}, {}
    for record in records:
        assert record.losses == pytest.approx(one.losses, rel=1e-5)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
        initial.update(record.initial)  # a pipeline rank has only some of the parameters
        gradients.update(record.gradients)
        final.update(record.final)
    assert set(initial) == set(one.initial) == set(gradients) == set(one.gradients)
    for name, tensor in one.initial.items():
        assert torch.equal(initial[name], tensor), f"initial {name}"
        difference = (gradients[name] - one.gradients[name]).norm()
        assert difference <= 1e-5 * one.gradients[name].norm(), f"gradient {name}"
        torch.testing.assert_close(final[name], one.final[name], rtol=1e-3, atol=1e-4)
