"""The meshes that must train like one device, and the comparison of a run with one on one device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from titan_testing.jobs import RunRecord, run_recipe

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


NEARLY_ZERO = 0.1
"""Share of the root mean square of all gradients that each counts as at least, for models that a suite does not know."""


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
    needs: tuple[str, ...] = ("titan-parallel",)
    """The distributions without which the mesh cannot be tried."""


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
EP = "parallelism.expert_parallel_degree"
WITH_EXPERTS = ("titan-experts", "titan-parallel")
EXPERT_CASES = [
    Case("EP 2", 2, {EP: 2}, needs=WITH_EXPERTS),
    Case("EP 2 x FSDP 2", 4, {EP: 2}, needs=WITH_EXPERTS),
    Case("EP 2 x TP 2", 4, {EP: 2, TP: 2}, needs=WITH_EXPERTS),
    Case("EP 2 x PP 2", 4, {EP: 2, PP: 2, SCHEDULE: "1F1B"}, needs=WITH_EXPERTS),
]
"""Meshes of models with experts. Their ranks are those of FSDP too."""


def run_in(folder: str, overrides: dict[str, object], weights: bool = True, recipe: str = "tiny") -> RunRecord:
    """Train ``recipe`` in ``folder``, as one rank of the process's job; return its record."""
    os.chdir(folder)
    return run_recipe(recipe, overrides, weights=weights)


def merged(records: Sequence[RunRecord]) -> RunRecord:
    """Return the record of the first rank, with the parameters of all: a rank of a pipeline has only some of them."""
    together: Any = {
        name: {parameter: tensor for record in records for parameter, tensor in getattr(record, name).items()}
        for name in ("initial", "gradients", "final")
    }
    return replace(records[0], **together)


def require_equal(
    records: Sequence[RunRecord], one: RunRecord, loss: float = 1e-5, gradient: float = 1e-5, least: float = 0.0
) -> None:
    """Assert that a run on a mesh equals one on one device: initial weights and counted statistics exactly, each gradient of
    the first step, losses, metrics, gradient norms, validations and final weights to rounding, and to what its transforms
    declare (``MeshUse.tolerance``).

    Args:
        records: of each rank.
        loss: largest relative difference of a loss; ten times as much of a gradient norm.
        gradient: largest norm of the difference of a parameter's gradients, relative to the gradient's.
        least: see :func:`_differences`.
    """
    found = merged(records)
    loss, gradient = loss + found.tolerance, gradient + found.tolerance
    assert set(found.initial) == set(one.initial), "the mesh has other parameters than one device"
    for name, tensor in one.initial.items():
        assert torch.equal(found.initial[name], tensor), f"parameter {name!r} starts from other values than on one device"
    for number, (value, expected) in enumerate(zip(found.losses, one.losses, strict=True), start=1):
        assert value == pytest.approx(expected, rel=loss), (
            f"the loss of step {number} is {value:.8g}, and {expected:.8g} on one device"
        )
        if number == 1:
            _require_equal_gradients(found, one, gradient, least)
    for record in records:
        assert record.losses == pytest.approx(one.losses, rel=loss), "the losses of a rank differ from one device's"
        for number, (norm, expected) in enumerate(zip(record.grad_norms, one.grad_norms, strict=True), start=1):
            assert norm == pytest.approx(expected, rel=10 * loss), (
                f"the gradient norm of step {number} is {norm:.8g}, and {expected:.8g} on one device"
            )
        if loss <= 1e-5:  # else a low precision may send a token to another expert
            assert record.statistics == one.statistics, "the statistics of a step differ from one device's"
        for found_by_name, by_name in zip(record.metrics + record.auxiliary, one.metrics + one.auxiliary, strict=True):
            assert found_by_name == pytest.approx(by_name, rel=10 * loss, abs=1e-6), "a metric differs from one device's"
        for step, (measured, targets) in one.validation.items():
            assert record.validation[step][1] == targets, "a validation has other targets than on one device"
            assert record.validation[step][0] == pytest.approx(measured, rel=loss), (
                f"the validation loss of step {step} differs from one device's"
            )
            assert record.validation_metrics[step] == pytest.approx(one.validation_metrics[step], rel=10 * loss, abs=1e-6), (
                f"a metric of the validation of step {step} differs from one device's"
            )
    for name, tensor in one.final.items():
        torch.testing.assert_close(found.final[name], tensor, rtol=100 * loss, atol=10 * loss)


def _require_equal_gradients(found: RunRecord, one: RunRecord, within: float, least: float) -> None:
    assert set(found.gradients) == set(one.gradients), "the mesh gives other parameters a gradient than one device"
    for name, difference in _differences(found, one, least).items():
        assert difference <= within, (  # not so if it is NaN
            f"the gradient of parameter {name!r} differs from one device's by {difference:.2e} of its norm; {within:.1e} is "
            "allowed (a transform may declare more: MeshUse.tolerance)"
        )


def largest_differences(found: RunRecord, one: RunRecord) -> str:
    """Return the largest relative differences of a run from one on one device, and the parameter of the gradient's."""
    loss = max(abs(value - expected) / abs(expected) for value, expected in zip(found.losses, one.losses, strict=True))
    gradients = _differences(found, one, NEARLY_ZERO)
    worst = max(gradients, key=gradients.__getitem__)
    return f"losses within {loss:.1e}, gradients within {gradients[worst]:.1e} ({worst})"


def _differences(found: RunRecord, one: RunRecord, least: float) -> dict[str, float]:
    """Return the norm of the difference of each parameter's gradients in step 1, relative to the gradient's norm.

    A gradient that is zero in theory, such as that of a key's bias under softmax, consists of rounding errors. The root mean
    square of a gradient therefore counts as no smaller than ``least`` times that of all gradients.
    """
    squares = sum(float(tensor.square().sum()) for tensor in one.gradients.values())
    floor = least * (squares / max(1, sum(tensor.numel() for tensor in one.gradients.values()))) ** 0.5
    return {
        name: float((found.gradients[name] - tensor).norm())
        / max(float(tensor.norm()), floor * tensor.numel() ** 0.5, 1e-30)
        for name, tensor in one.gradients.items()
    }
