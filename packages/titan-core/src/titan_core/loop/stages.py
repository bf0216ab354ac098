"""Trains the stages of a run, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from titan_core.api import Checkpoint, RunEnd, UserError
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.job.stages import job_of_stage
from titan_core.loop.collector import free_job
from titan_core.toolkit.status import phase

log = logging.getLogger(__name__)


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
    return checkpoint.resumes_after.load()(checkpoint.context(job))
