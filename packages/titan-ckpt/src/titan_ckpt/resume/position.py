"""The step that a run resumes after, its position in the data there, and the command that resumes it. Does not import
torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.catalogue import checkpoint_folder, entries, entry, pick, step_folder, steps_in
from titan_core.api import Job, JobContext, RunEnd, SavedPosition, UserError
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.api.config.sections import TrainingSection
from titan_core.api.observe.events import NextCommand
from titan_core.api.plugins.assembled_job import AssembledJob
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


def find_position(context: JobContext[CheckpointSection], step: int) -> SavedPosition | None:
    """Return the position in the data in the run's newest complete checkpoint of at most ``step`` steps; ``None`` if there
    is none. Checkpoints of weights alone have no position."""
    folder = checkpoint_folder(context.job.dump_folder, context.section.folder)
    for found in (one for one in steps_in(folder) if one <= step):
        checkpoint = step_folder(folder, found)
        manifest = entry(checkpoint, found).manifest
        if manifest is not None and not manifest.model_only:
            return SavedPosition(found, manifest.state["loader"], checkpoint=str(checkpoint))
    return None


def resume_commands(job: AssembledJob, end: RunEnd, command: tuple[str, ...] | None) -> list[NextCommand]:
    """Return the command that trains further than a run did. Empty if that is impossible: nothing was saved or only the
    weights, the data has ended, or it is unknown how the run was started."""
    config = job.config
    section, training = config.section(CheckpointSection), config.section(TrainingSection)
    if end.checkpoint is None or command is None or (end.completed and section.last_save_model_only):
        return []
    if end.completed:
        changes = {"training.steps": min(2 * end.step, MOST_STEPS)}
    elif training.stop_at_step is not None and end.step >= training.stop_at_step:
        changes = {"training.stop_at_step": training.steps}
    else:
        return []
    if section.load_step >= 0:  # the step that this run resumed from
        changes["checkpoint.load_step"] = -1
    return [NextCommand("train further", with_overrides(command, changes))]


def with_overrides(arguments: Sequence[str], changes: Mapping[str, object]) -> tuple[str, ...]:
    """Return the arguments of a command with ``--key value`` for each change, in place of any override of that key."""
    kept: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        flag, equals, _ = argument.partition("=")
        if flag.removeprefix("--").replace("-", "_") not in changes:
            kept.append(argument)
        elif not equals and waiting and not waiting[-1].startswith("--"):
            waiting.pop()
    return (*kept, *(text for key, value in changes.items() for text in (f"--{key}", str(value))))
