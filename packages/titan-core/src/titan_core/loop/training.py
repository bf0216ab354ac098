"""Trains a job on this rank: its stages, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import torch

from titan_core.api import Checkpoint, RunEnd, UserError
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.streams import OpenedData
from titan_core.job.stages import assembled_again, job_of_stage
from titan_core.loop.gc_settings import free_job, gc_as_before
from titan_core.loop.interruption import Interruption
from titan_core.loop.process_settings import numerics_as_before
from titan_core.loop.results import print_next_commands
from titan_core.loop.trainer import Trainer
from titan_core.loop.world import join_world
from titan_core.plugins.guard import named
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.runlog.optional_observers import register_late_observers
from titan_core.runlog.other_runs import require_own_run
from titan_core.runlog.run_directory import RunDirectory, run_lock
from titan_core.runlog.time_by_cause import SpentTime
from titan_core.toolkit.launching import Began, user_command
from titan_core.toolkit.status import phase

log = logging.getLogger(__name__)


def train(
    job: AssembledJob,
    observers: Iterable[object] = (),
    next_commands: bool = False,
    began: Began | None = None,
) -> RunEnd:
    """Train ``job`` on this rank until its last step, the end of its data, or an error. In a run of several stages, each
    stage has a new :class:`Trainer`, and resumes from the last checkpoint of the stage before it.

    The process is afterwards as before, but for torch's and Python's random generators, which the job has seeded.

    Args:
        job: of a run with stages, the job of the first one.
        observers: further objects with lifecycle hooks (:mod:`titan_core.api.hookspecs`).
        next_commands: whether to print, at the end of the run, the commands that its user may want next.
        began: when the attempt did (default: now).

    Raises:
        UserError: a mistake that only the hardware, the data or the other ranks reveal.
    """
    given = list(observers)
    while True:
        for stage in stages_to_train(job):
            end = _train(stage, given, next_commands, SpentTime(began))
            began = None  # what follows begins now
            if not continues(stage, end):
                break
        if not end.restarts:
            return end
        job = assembled_again(job)


def _train(job: AssembledJob, observers: Iterable[object], next_commands: bool, spent: SpentTime) -> RunEnd:
    """Train one stage of a run."""
    lifecycle = Lifecycle()
    for module, origin in job.registry.modules():
        lifecycle.register(module, origin=origin)
    for one in job.observers:
        if not (one.first_rank or one.may_fail):
            lifecycle.register(one.build.load()(one.context(job)), origin=job.registry.origin(one))
    for observer in observers:
        lifecycle.register(observer)
    with gc_as_before(), numerics_as_before(), ExitStack() as stack:
        trainer: Trainer | None = None
        try:
            if job.missing:
                raise UserError(*job.missing)
            lifecycle.job_assembled(job)
            for note in job.notes:
                log.info("%s", note)
            # Hardware, data and directory come first: their mistakes are reported before any process group or model exists.
            job.require_hardware()
            with phase("reading the data"):
                data = OpenedData.of(job)
            directory = RunDirectory.create(job.dump_folder)
            stack.enter_context(run_lock(job.dump_folder))
            if job.checkpoint is None:  # with checkpoints, only the attempt to restore one shows whether the start is fresh
                require_own_run(directory.path, job)
            stack.enter_context(directory.locks)
            with phase("joining the other ranks" if job.mesh.world_size > 1 else "preparing the device"):
                world = stack.enter_context(join_world(job))
            interruption = stack.enter_context(Interruption())
            lifecycle.register(interruption)
            register_late_observers(job, lifecycle, world.rank)
            trainer = Trainer(job, world, data, lifecycle, directory, interruption, spent)
            stack.callback(trainer.close)
            end = trainer.run()
            if trainer.prepare_restart is not None:
                trainer.close()
                world.on_first_rank(trainer.prepare_restart)
        except BaseException as error:
            step, failure = trainer.state.step if trainer is not None else 0, named(error, job.registry)
            lifecycle.failed(RunEnd(step, False, type(failure).__name__, error=failure, dump_folder=job.dump_folder))
            if failure is error:
                raise
            raise failure  # noqa: B904 - it has its cause
        lifecycle.train_end(end)
        if (
            next_commands
            and world.rank == 0
            and not (end.interrupted or end.preempted or end.restarts or continues(job, end))
        ):
            arguments = user_command()[1]
            command = None if arguments is None else tuple(arguments)
            print_next_commands(lifecycle.next_commands(job, end, command))
        return end


def stages_to_train(job: AssembledJob) -> Iterator[AssembledJob]:
    """Yield the job of each stage from the one in which the run stands; ``job`` itself if the run has no stages.

    Raises:
        UserError: the job saves no checkpoints, from which the stages continue.
    """
    if not job.stages:
        yield job
        return
    stop = job.section(TrainingSection).stop_at_step
    last = job.stage_after(min(job.steps, job.steps if stop is None else stop) - 1)
    for number in range(job.stage_after(_resumes_after(job, last)), last + 1):
        stage = job_of_stage(job, number)
        log.info("stage %r: steps %d to %d", job.stages[number].name, stage.first_step + 1, stage.end_step)
        yield stage
        with phase("leaving the stage"):
            free_job()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def continues(job: AssembledJob, end: RunEnd) -> bool:
    """Whether the next stage follows the one that ``end`` describes."""
    stop = job.section(TrainingSection).stop_at_step
    ended = end.interrupted or end.preempted or end.data_ended or end.failed or end.restarts
    return not ended and end.step == job.end_step < min(job.steps, job.steps if stop is None else stop)


def _resumes_after(job: AssembledJob, last: int) -> int:
    """Return the step after which the run starts.

    Args:
        last: number of the last stage to train. A run that ends in its first stage needs no checkpoints.
    """
    checkpoint = job.checkpoint
    if checkpoint is None and last == 0:
        return 0
    if checkpoint is None:
        why = "each stage continues from the checkpoint of the one before it, and this job saves none"
        raise UserError.one(job.config.where("stages"), why, "set checkpoint.enable = true")
    assert isinstance(checkpoint, Checkpoint)
    if checkpoint.resumes_after is None:
        why = "does not say from which step a run resumes (Checkpoint.resumes_after), so its stage is not known"
        raise UserError.one(f"checkpoint {checkpoint.name!r}", why, "use another checkpoint plugin, or no stages")
    step = checkpoint.resumes_after.call(int, checkpoint.context(job))
    if step < 0:
        raise checkpoint.resumes_after.wrong(f"returned {step}; it must return a whole number, at least 0")
    return step
