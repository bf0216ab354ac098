"""The contract between Titan's core and its plugins, to be read from top to bottom by a plugin's author.

A plugin is a module that an entry point of group ``titan.plugins`` names, by habit ``your_package/plugin.py``::

    from titan_core.api.components import Model
    from titan_core.api.ref import Ref

    api = (1, 0)                                    # the version of this contract that it was written for

    @hookimpl
    def titan_models():
        return [Model(name="tiny", summary="...", flavors=..., define=Ref("your_package.define:define"))]

Rules: ``plugin.py`` must not import torch (nor anything slow); code behind a ``Ref`` may. A hook takes any subset of the
arguments in its specification, by name. A misspelt hook, a wrong argument or a missing ``@hookimpl`` is an error at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch import Tensor  # for type checkers alone: discovery loads this module, and must not load torch

    from titan_core.api.checkpoint import Checkpoint
    from titan_core.api.command import Command
    from titan_core.api.components import (
        Dataset,
        Debugger,
        LRSchedule,
        Model,
        Objective,
        Optimizer,
        Recipe,
        Tokenizer,
        Transform,
    )
    from titan_core.api.events import Finding, PendingUpdate, RunStart, StepReport, TrainEnd, ValidationReport
    from titan_core.api.job import Job
    from titan_core.api.launcher import Launcher
    from titan_core.api.metric_log import MetricLogger, Record

PROJECT = "titan"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

# ---- Registration: called once, at discovery. Each returns descriptions (api.components), and must be quick. ----


@hookspec
def titan_models() -> Sequence[Model]:  # type: ignore[empty-body]
    """Model stage: model families with their flavors."""


@hookspec
def titan_parallelisms() -> Sequence[Transform]:  # type: ignore[empty-body]
    """Parallelism stage: transforms that divide, recompute or compile a model. They read its layout, never its class."""


@hookspec
def titan_precisions() -> Sequence[Transform]:  # type: ignore[empty-body]
    """Precision stage: transforms, of phase PRECISION, that change the number formats of a model's modules."""


@hookspec
def titan_checkpoints() -> Sequence[Checkpoint]:  # type: ignore[empty-body]
    """Checkpoint stage: ways to save and restore a run. At most one is active in a job."""


@hookspec
def titan_debuggers() -> Sequence[Debugger]:  # type: ignore[empty-body]
    """Debug stage: observers, built when a job selects them, that implement the lifecycle hooks below."""


@hookspec
def titan_datasets() -> Sequence[Dataset]:  # type: ignore[empty-body]
    """Sources of documents (``training.dataset``)."""


@hookspec
def titan_tokenizers() -> Sequence[Tokenizer]:  # type: ignore[empty-body]
    """Tokenizers (``model.tokenizer``)."""


@hookspec
def titan_optimizers() -> Sequence[Optimizer]:  # type: ignore[empty-body]
    """Optimizers (``optimizer.name``)."""


@hookspec
def titan_objectives() -> Sequence[Objective]:  # type: ignore[empty-body]
    """What training minimises (``objective.name``)."""


@hookspec
def titan_lr_schedules() -> Sequence[LRSchedule]:  # type: ignore[empty-body]
    """Learning rate schedules (``lr_scheduler.name``)."""


@hookspec
def titan_metric_loggers() -> Sequence[MetricLogger]:  # type: ignore[empty-body]
    """Places that metrics go to."""


@hookspec
def titan_recipes() -> Sequence[Recipe]:  # type: ignore[empty-body]
    """Complete configs that ship with the plugin (``titan train NAME``)."""


@hookspec
def titan_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Subcommands of ``titan``."""


@hookspec
def titan_launchers() -> Sequence[Launcher]:  # type: ignore[empty-body]
    """Ways to start the ranks of a job from ``titan train``."""


# ---- Lifecycle: called while a job runs, on every rank, in this order. A plugin module may implement them itself, to be
# ---- called in every job, or register a Debugger, whose object implements them when a job selects it. A hook that raises
# ---- ends the job. A hook costs microseconds: they fire per step, never per layer.


@hookspec
def titan_job_assembled(job: Job) -> None:
    """The job is known and valid; no process group, device or model exists yet."""


@hookspec
def titan_restore_state(state: Mapping[str, Any]) -> None:
    """A checkpoint was restored. ``state`` is what the observers of the run that saved it returned from
    :func:`titan_save_state`; an observer's own is missing where that run did not have it."""


@hookspec
def titan_train_start(run: RunStart) -> None:
    """Everything is built and restored; the next thing is the first step."""


@hookspec
def titan_step_start(step: int) -> None:
    """Optimizer step ``step`` (counted from 1) is about to load its batch. Either :func:`titan_step_end` or
    :func:`titan_step_cancelled` follows, unless an error ends the run."""


@hookspec
def titan_step_cancelled(step: int) -> None:
    """Step ``step`` is not taken after all: the data has ended, or a rank was asked to stop. Nothing of it was computed."""


@hookspec
def titan_gradients_complete(step: int) -> None:
    """Every microbatch of step ``step`` has been computed, and the gradients of all parameters are accumulated. An observer
    may finish a reduction of gradients of its own here, in place: their norm, clipping and the update come after it."""


@hookspec
def titan_before_update(update: PendingUpdate) -> bool | None:
    """The step's gradients are complete, and their norm is known. One observer that returns ``True`` has the optimizer's
    update left out, as if the step had had no gradients (it counts as taken, and its data as read); it must do so on all
    ranks that train the same copy of the weights, which the loss and the gradient norm do."""


@hookspec
def titan_step_end(report: StepReport) -> None:
    """The step's optimizer update has been issued. The report's tensors may still be in flight on the device: reading
    one waits for it."""


@hookspec
def titan_figures(record: Record) -> Mapping[str, float | int | None] | None:
    """A logged step is about to go to the metric loggers: further figures for it, under other names. On rank 0 alone."""


@hookspec
def titan_validation_end(report: ValidationReport) -> None:
    """The loss on the validation data was measured."""


@hookspec
def titan_finding(finding: Finding) -> None:
    """An observer reports a finding (:attr:`~titan_core.api.events.RunStart.report`); on its rank alone, at any
    time, and perhaps in another thread than training's."""


@hookspec
def titan_flush(step: int) -> None:
    """The state after ``step`` is about to be relied on: a checkpoint is taken, or the run is done. Who reads a step's
    report late must do so now, and raise if it is bad."""


@hookspec
def titan_save_state() -> Mapping[str, Any] | None:
    """A checkpoint is taken: what the observer needs to continue as if the run had not stopped, under a name of its own (by
    habit, its component's). Plain values, as JSON has them (a list, not a tuple), and the same on all ranks:
    rank 0's are kept, and the run may resume on others."""


@hookspec
def titan_state_tensors() -> Mapping[str, Tensor] | None:
    """The tensors that the observer keeps and needs to continue as if the run had not stopped, under names of its own (by
    habit ``COMPONENT.name``). A checkpoint saves them with the model's; a resumed run loads into the very tensors that this
    returns, before :func:`titan_restore_state`. So they exist from the observer's construction on, and keep their names,
    shapes and types; a metric logger, which is built after the restore, cannot keep any. What is divided among ranks is a
    DTensor; any other tensor is the same on all ranks that train the same copy of the weights."""


@hookspec
def titan_checkpoint_saved(step: int, path: str) -> None:
    """A checkpoint of ``step`` is complete and committed at ``path``."""


@hookspec
def titan_exception(error: BaseException) -> None:
    """The run is ending because ``error`` was raised (KeyboardInterrupt included)."""


@hookspec(firstresult=True)
def titan_diagnose(run: str, since: float) -> str | None:
    """The ranks of a job have ended, and none of them by an error of its own: each lost another. What the files in the
    directory ``run`` say about it, in a line for the launcher to print, with the command that says more; ``None`` if they
    say nothing. Only files of the attempt that began ``since`` (seconds since the epoch) count.

    Called in the launcher's process, on plugin modules alone: no observer lives there."""


@hookspec
def titan_train_end(end: TrainEnd) -> None:
    """The run is over, by whatever way; the process group still exists, if the run came to have one."""
