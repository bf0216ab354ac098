"""From which step a run resumes. Does not import torch."""

from __future__ import annotations

import os

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.catalogue import checkpoint_folder, entries, pick
from titan_core.api import Job, JobContext, UserError
from titan_core.toolkit.jobs import AssembledJob
from titan_core.toolkit.launching import RESTART


def restarted(job: Job) -> bool:
    """Whether this job has started before: a launcher has restarted it, after a failure or because machines joined or left,
    or it has started again by itself."""
    if isinstance(job, AssembledJob) and job.restarted:
        return True
    return RESTART in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def resumes_after(context: JobContext[CheckpointSection]) -> int:
    """See :attr:`titan_core.api.Checkpoint.resumes_after`."""
    section = context.section
    if section.load_step >= 0 and not restarted(context.job):
        return section.load_step
    folder = checkpoint_folder(context.job.dump_folder, section.folder)
    newest = next((found.step for found in entries(folder) if found.manifest is not None), None)
    if newest is not None:
        return newest
    if section.initial_load_path and not section.initial_load_model_only:
        try:
            return pick(section.initial_load_path, None).step
        except UserError:
            return 0  # loading it says what is wrong with it
    return 0
