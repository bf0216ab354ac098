"""The contract between Titan's core and its plugins. Plugin authors should read it from top to bottom.

A plugin is a module that an entry point in the group ``titan.plugins`` names, by convention ``your_package/plugin.py``::

    from titan_core.api import Model, Ref, hookimpl

    api = (1, 0)                                    # the version of this contract that the plugin was written for

    @hookimpl
    def titan_models():
        return [Model(name="tiny", summary="...", flavors=..., define=Ref("your_package.define:define"))]

``plugin.py`` must not import torch or anything else that is slow to import; code behind a ``Ref`` may. A hook takes any
subset of the arguments in its specification, by name. A misspelt hook, an unknown argument or a missing ``@hookimpl`` is an
error when the plugin is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from titan_core.api.checkpoint.store import Checkpoint
from titan_core.api.commands.command import Command
from titan_core.api.commands.health import HealthCheck
from titan_core.api.data.components import Dataset, ModelHub, RecordFormat, Tokenizer
from titan_core.api.model.components import Model
from titan_core.api.observe.components import Observer
from titan_core.api.observe.events import Record
from titan_core.api.parallel.components import Transform
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.component import Recipe
from titan_core.api.training.components import LRSchedule, Objective, Optimizer

if TYPE_CHECKING:
    from torch import Tensor  # for type checkers only: discovery loads this module and must not load torch

    from titan_core.api.observe.events import (
        Finding,
        PendingUpdate,
        Run,
        RunEnd,
        StepReport,
        ValidationReport,
    )

PROJECT = "titan"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator of the functions and methods that implement a hook, each named like its hook: a function of the plugin's module
registers components, and a method of an observer is called during the run.

``@hookimpl(tryfirst=True)`` makes pluggy call a method before those of other observers, ``trylast=True`` after them. With
``wrapper=True``, a method is a generator function around all others: it yields once, receives their results from the
``yield``, and returns what the caller gets. Hooks that register components, and those whose answers belong to one observer
each, such as ``titan_save_state``, cannot be wrapped."""

# ---- Registration: called once, at discovery. These hooks return components and must be fast. ----


@hookspec
def titan_models() -> Sequence[Model]:  # type: ignore[empty-body]
    """Model stage: model families and their flavors."""


@hookspec
def titan_parallelisms() -> Sequence[Transform]:  # type: ignore[empty-body]
    """Parallelism stage: transforms that shard, recompute or compile a model. They read its layout, never its class."""


@hookspec
def titan_precisions() -> Sequence[Transform]:  # type: ignore[empty-body]
    """Precision stage: transforms of phase PRECISION, which change the number formats of a model's modules."""


@hookspec
def titan_checkpoints() -> Sequence[Checkpoint]:  # type: ignore[empty-body]
    """Checkpoint stage: ways to save and restore a run. A job has at most one active."""


@hookspec
def titan_debuggers() -> Sequence[Observer]:  # type: ignore[empty-body]
    """Debug stage: observers of a run that a job can select. They implement the lifecycle hooks below."""


@hookspec
def titan_datasets() -> Sequence[Dataset]:  # type: ignore[empty-body]
    """Sources of documents (``training.dataset``)."""


@hookspec
def titan_formats() -> Sequence[RecordFormat]:  # type: ignore[empty-body]
    """Conversions of a dataset's records (``data.format``)."""


@hookspec
def titan_tokenizers() -> Sequence[Tokenizer]:  # type: ignore[empty-body]
    """Tokenizers (``model.tokenizer``)."""


@hookspec
def titan_model_hubs() -> Sequence[ModelHub]:  # type: ignore[empty-body]
    """Places where models have names (``model.from_pretrained = "organisation/model"``)."""


@hookspec
def titan_optimizers() -> Sequence[Optimizer]:  # type: ignore[empty-body]
    """Optimizers (``optimizer.name``)."""


@hookspec
def titan_objectives() -> Sequence[Objective]:  # type: ignore[empty-body]
    """Objectives that training can minimise (``objective.name``)."""


@hookspec
def titan_lr_schedules() -> Sequence[LRSchedule]:  # type: ignore[empty-body]
    """Learning-rate schedules (``lr_scheduler.name``)."""


@hookspec
def titan_metric_loggers() -> Sequence[Observer]:  # type: ignore[empty-body]
    """Observers that write a run's metrics (:func:`titan_metrics`), by convention with ``first_rank`` and ``may_fail``."""


@hookspec
def titan_recipes() -> Sequence[Recipe]:  # type: ignore[empty-body]
    """Complete configs that ship with the plugin (``titan train NAME``)."""


@hookspec
def titan_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Subcommands of ``titan``."""


@hookspec
def titan_health_checks() -> Sequence[HealthCheck]:  # type: ignore[empty-body]
    """Checks of the machine and the installation that ``titan doctor`` runs."""


# ---- Lifecycle: called while a job runs, on every rank, in this order. Hooks of a plugin module are called in every job;
# ---- hooks of the object that an Observer builds are called in the jobs that select it. A hook that raises ends the job.
# ---- Hooks fire per step, never per layer, and a call costs microseconds.


@hookspec
def titan_job_assembled(job: AssembledJob) -> None:
    """The job is assembled and valid. No process group, device or model exists yet."""


@hookspec
def titan_restore_state(state: Mapping[str, Any]) -> None:
    """A checkpoint was restored. ``state`` holds the values that observers returned from :func:`titan_save_state` in the run
    that saved it. The entry of an observer that was not active in that run is missing."""


@hookspec
def titan_train_start(run: Run) -> None:
    """Everything is built and restored. The first step follows."""


@hookspec
def titan_step_start(step: int) -> None:
    """Optimizer step ``step`` (counted from 1) is about to start. Unless an error ends the run, either
    :func:`titan_step_end` or :func:`titan_step_cancelled` follows."""


@hookspec
def titan_step_cancelled(step: int) -> None:
    """Step ``step`` was cancelled: before any computation, because the data ended or a rank was asked to stop; or later, by
    the step runner (:class:`~titan_core.api.StepAbandoned`), and then a step starts again."""


@hookspec
def titan_gradients_complete(step: int) -> None:
    """All microbatches of step ``step`` are computed, and the gradients of all parameters are accumulated. The observer of a
    transform (``StepUse.observer``) may complete a gradient reduction of its own here, in place: gradient norm, clipping and
    update follow.

    It is part of the trial before step 1, which compares the gradients of a small copy of the model on this mesh with those
    on one device: an observer of a transform that divides the job is also built for that copy, and of its hooks only this
    one is called there, with ``step`` 1."""


@hookspec
def titan_before_update(update: PendingUpdate) -> bool | Tensor | None:
    """The gradients of the step and their norm are computed, or about to be on the device. If an observer returns ``True``,
    the optimizer skips the update, as if the gradients had been absent; the step still counts as taken and its data as read.
    All ranks that train the same replica must return the same value. Decisions based on the loss or the gradient norm
    satisfy this.

    Reading a figure waits for the device. An observer that decides by figures should return a 0-d bool tensor computed from
    them: the device then decides, and ``StepReport.skipped`` shows the decision."""


@hookspec
def titan_step_end(report: StepReport) -> None:
    """The optimizer update of the step was launched. The report's tensors may still be in flight on the device: reading one
    waits for the device."""


@hookspec
def titan_figures(record: Record) -> Mapping[str, float | int | None] | None:
    """Return additional metrics, under new names, for a step that is about to be logged. Called on rank 0 only."""


@hookspec
def titan_metrics(record: Record) -> None:
    """The metrics of a logged step, or of a validation. Called on rank 0 only."""


@hookspec
def titan_validation_end(report: ValidationReport) -> None:
    """The validation loss was measured."""


@hookspec
def titan_finding(finding: Finding) -> None:
    """An observer reported a finding (:attr:`~titan_core.api.Run.report`). Called on the observer's rank only,
    at any time, possibly in a thread other than the training thread."""


@hookspec
def titan_flush(step: int) -> None:
    """A checkpoint is about to be taken after ``step``, or the run is complete. Observers that defer reading a step's report
    must read it now, and raise if its values are bad."""


@hookspec
def titan_save_state() -> Mapping[str, Any] | None:
    """Return the state that the observer needs after a resume, under a name of its own (by convention its component's name).
    Called when a checkpoint is taken. The values must survive JSON (lists, not tuples) and be the same on all ranks: rank
    0's are saved, and the run may resume on a different number of ranks."""


@hookspec
def titan_state_tensors() -> Mapping[str, Tensor] | None:
    """Return the tensors that the observer needs after a resume, under names of its own (by convention ``COMPONENT.name``).

    A checkpoint saves them with the model's tensors. A resumed run loads into these same tensors before it calls
    :func:`titan_restore_state`, so they must exist once the observer is constructed and keep their names, shapes and types.
    An observer with ``first_rank`` cannot have any. A tensor that is sharded over ranks must be a
    DTensor; any other tensor must be the same on all ranks that train the same replica."""


@hookspec
def titan_checkpoint_saved(step: int, path: str) -> None:
    """The checkpoint of ``step`` is complete and committed at ``path``."""


@hookspec
def titan_train_end(end: RunEnd) -> None:
    """The run is over, for whatever reason; ``end.error`` is the exception that ended it, if any. If the run had a process
    group, it still exists. After an error the hook of every observer is called, even if those of others raise."""
