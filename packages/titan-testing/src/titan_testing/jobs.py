"""Trains a recipe in this process and records the results."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_core.api import hookimpl
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.job.elastic import load_job
from titan_core.plugins.registry import Components


@dataclass
class RunRecord:
    """The results of a run, as plain tensors and numbers."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    rank_losses: list[list[float]] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    statistics: list[dict[str, list[Any]]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    """Number of targets in the global batch of each step."""
    skipped: list[int] = field(default_factory=list)
    """Steps whose update was skipped."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    """Full parameters before the first step, by name."""
    final: dict[str, Tensor] = field(default_factory=dict)
    """Full parameters after the last step, by name."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Full gradients of the first step before clipping, by name of the parameter."""
    validation: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Validation loss and its number of targets, by step."""
    validation_metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    named_validation: dict[tuple[int, str], float] = field(default_factory=dict)
    """Losses of validations that have a name, by step and name."""
    events: list[str] = field(default_factory=list)
    reason: str = ""
    tolerance: float = 0.0
    """Sum of what the job's transforms declare (:attr:`titan_core.api.MeshUse.tolerance`)."""


class JobRecorder:
    """An observer that fills a :class:`RunRecord`."""

    def __init__(self, weights: bool) -> None:
        self.record = RunRecord()
        self._weights = weights
        self._parts: list[Any] = []

    @hookimpl
    def titan_job_assembled(self) -> None:
        """Record the event."""
        self.record.events.append("job_assembled")

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        """Record the initial weights."""
        # The first step's collection, of all objects, takes 0.25 s with those of torch. The trainer unfreezes them.
        gc.freeze()
        self.record.events.append("train_start")
        self._parts = run.parts
        self.record.tolerance = sum(transform.mesh.tolerance for transform in run.job.transforms)
        self.record.initial = self._whole()

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Record the event."""
        self.record.events.append(f"step_start {step}")

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        """Record the figures of the step."""
        self.record.events.append(f"step_end {report.step}")
        self.record.losses.append(report.loss.item())
        self.record.grad_norms.append(report.grad_norm.item())
        self.record.learning_rates.append(report.lr)
        self.record.rank_losses.append(report.rank_losses.tolist())
        self.record.auxiliary.append({name: value.item() for name, value in report.auxiliary.items()})
        self.record.metrics.append({name: value.item() for name, value in report.metrics.items()})
        self.record.statistics.append({name: value.tolist() for name, value in report.statistics.items()})
        self.record.targets.append(report.num_targets)
        if report.skipped:
            self.record.skipped.append(report.step)

    @hookimpl
    def titan_validation_end(self, report: Any) -> None:
        """Record the losses."""
        if report.name or report.dataset:
            self.record.named_validation[report.step, "/".join(filter(None, (report.name, report.dataset)))] = report.loss
            return
        self.record.validation[report.step] = (report.loss, report.num_targets)
        self.record.validation_metrics[report.step] = dict(report.metrics)

    @hookimpl
    def titan_train_end(self, end: Any) -> None:
        """Record the final weights."""
        if end.failed:
            self.record.events.append(f"exception {type(end.error).__name__}")
        self.record.events.append("train_end")
        self.record.reason = end.reason
        self.record.final = self._whole()

    @hookimpl(trylast=True)  # observers of transforms may complete gradients themselves
    def titan_gradients_complete(self, step: int) -> None:
        """Record the gradients of the first step."""
        if self._weights and not self.record.gradients:
            named = [pair for part in self._parts for pair in part.named_parameters()]
            self.record.gradients = {name: whole(tensor.grad) for name, tensor in named if tensor.grad is not None}

    def _whole(self) -> dict[str, Tensor]:
        if not self._weights:
            return {}
        return {name: whole(tensor) for part in self._parts for name, tensor in part.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """Return a detached copy of the full tensor."""
    tensor = tensor.detach()
    # Always clone: the full tensor of a DTensor with one shard is the shard itself.
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


TINY: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 2,
}
"""Settings of ``tiny`` that train in a second."""


OF_THE_DEFAULT_RECIPE = {"checkpoint.enable": "false", "sample.enable": "false"}
"""Switches off the checkpoints and samples of the default recipe; a test of these switches them on."""


def make_job(
    recipe: str, overrides: dict[str, object] | None = None, world_size: int | None = None, missing_ok: bool = False
) -> AssembledJob:
    """Assemble a job as the command line would."""
    installed = Components.from_installed()
    settings = {**(overrides or {})}
    if recipe == "llama3_debug":
        off = {key: value for key, value in OF_THE_DEFAULT_RECIPE.items() if key.split(".")[0] in installed.sections()}
        settings = {**off, **settings}
    given = [Override(key, str(value)) for key, value in settings.items()]
    size = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    return load_job(recipe, given, installed, size, missing_ok)


def run_recipe(
    recipe: str, overrides: dict[str, object] | None = None, weights: bool = False, observers: Iterable[object] = ()
) -> RunRecord:
    """Train a recipe; return its record."""
    return run_job(make_job(recipe, overrides), weights, observers)


def run_job(job: AssembledJob, weights: bool = False, observers: Iterable[object] = ()) -> RunRecord:
    """Train ``job``; return its record."""
    from titan_core.loop import training  # imports torch's compiler, which few tests need

    recorder = JobRecorder(weights)
    training.train(job, [recorder, *observers])
    return recorder.record
