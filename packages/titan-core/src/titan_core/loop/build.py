"""Builds the objects of a run that the job's components provide."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from titan_core.api import (
    Checkpoint,
    CheckpointContext,
    CheckpointStore,
    LRScheduleContext,
    ModelPart,
    OptimizerSection,
    StepRunner,
    TrainingContext,
    TrainState,
    Transform,
    World,
)
from titan_core.api.config.sections import TrainingSection
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.training.optimizer import param_groups, trained_parameters
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.runlog.run_directory import RunDirectory


def build_step_runner(job: AssembledJob, world: World, parts: list[ModelPart]) -> StepRunner:
    """Build what runs a step forward and backward: gradient accumulation, or what a transform puts in its place."""
    runner: StepRunner = GradientAccumulation(parts[0])  # replaced by a pipeline, the only case of several parts
    for transform in job.transforms:
        if transform.steps.runner is not None:
            runner = transform.steps.runner.call(StepRunner, runner, parts, _context(transform, job, world))
    return runner


def register_transform_observers(job: AssembledJob, world: World, parts: list[ModelPart], lifecycle: Lifecycle) -> None:
    """Register the observers that the job's transforms bring."""
    for transform in job.transforms:
        if transform.steps.observer is not None:
            observer = transform.steps.observer.load()(parts, _context(transform, job, world))
            lifecycle.register(observer, origin=job.registry.origin(transform), changes_weights=True)


def build_optimizer(job: AssembledJob, world: World, parts: list[ModelPart]) -> Optimizer:
    """Build the optimizer of this rank's parameters."""
    groups = param_groups(trained_parameters(parts), job.config.section(OptimizerSection))
    context = job.optimizer.optimizer_context(job, world.mesh, world.device, groups)
    return job.optimizer.build.call(Optimizer, context)


def build_lr_scheduler(job: AssembledJob, optimizer: Optimizer) -> LRScheduler:
    """Build the learning-rate schedule over all steps of the job, whatever step this run stops at."""
    steps = job.config.section(TrainingSection).steps
    section = job.lr_schedule.section_in(job.config)
    context = LRScheduleContext(section=section, job=job, optimizer=optimizer, steps=steps)
    return job.lr_schedule.build.call(LRScheduler, context)


def build_checkpoint_store(
    job: AssembledJob, world: World, state: TrainState, lifecycle: Lifecycle, directory: RunDirectory
) -> CheckpointStore | None:
    """Build what saves and restores ``state``; ``None`` if the job saves no checkpoints."""
    if job.checkpoint is None:
        return None
    assert isinstance(job.checkpoint, Checkpoint) and job.checkpoint.build is not None  # as it is active
    context = CheckpointContext(
        section=job.checkpoint.section_in(job.config),
        job=job,
        world=world,
        state=state,
        lifecycle=lifecycle,
        lock_folder=directory.lock_folder,
    )
    return job.checkpoint.build.call(CheckpointStore, context)


def _context(transform: Transform, job: AssembledJob, world: World) -> TrainingContext[Any]:
    return transform.training_context(job, world.mesh, world.device)
