"""The command that resumes a run which has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_ckpt.config import CheckpointSection
from titan_core.api import RunEnd
from titan_core.toolkit.jobs import AssembledJob, NextCommand
from titan_core.toolkit.sections import MOST_STEPS, TrainingSection


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
