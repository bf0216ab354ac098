"""Results of a run for its user: weights, and the commands to continue with."""

from __future__ import annotations

import logging
import sys

from titan_core.api import Checkpoint, CheckpointStore, RunEnd, UserError
from titan_core.api.observe.events import NextCommand
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.errors import shown
from titan_core.loop.interruption import Interruption
from titan_core.toolkit.launching import shell_command
from titan_core.toolkit.text import say

log = logging.getLogger(__name__)


def warn_if_unsaved(job: AssembledJob) -> None:
    """Log a warning, before the first step, if the run will end without saved weights."""
    if job.checkpoint is not None:
        return
    sections = [one.config for one in job.registry.all(Checkpoint) if one.config is not None]
    keys = [f"{section.section}.enable = true" for section in sections if "enable" in section.model_fields]
    if keys:
        fix = f"set {' or '.join(keys)}"
    elif job.registry.all(Checkpoint):
        fix = "select a checkpoint plugin"
    else:
        fix = "install titan-ckpt, and set checkpoint.enable = true"
    log.warning("the trained weights will not be saved: %s", fix)


def end_of_run(step: int, last_step: int, job: AssembledJob, interruption: Interruption) -> RunEnd:
    """Return why a run, or the stage of ``job``, ended after ``step`` without an error.

    Args:
        last_step: the last step that was to be taken.
    """
    completed, of_stage = step >= job.steps, step == job.end_step < job.steps
    if completed:
        return RunEnd(step, completed, "all steps are done")
    if step >= last_step and not of_stage:
        return RunEnd(step, completed, "training.stop_at_step was reached")
    if interruption.interrupt.agreed:
        return RunEnd(step, completed, reason=f"interrupted{' after a complete step' * bool(step)}", interrupted=True)
    if interruption.stop.agreed:
        stopped = "stopped after a complete step, to be resumed" if step else "stopped, to be started again"
        return RunEnd(step, completed, reason=f"{interruption.cause}: {stopped}", preempted=True)
    if of_stage:
        return RunEnd(step, completed, f"stage {job.stages[job.stage].name!r} is complete")
    return RunEnd(step, completed, reason="the dataset has ended", data_ended=True)


def last_checkpoint(store: CheckpointStore | None, end: RunEnd, warns: bool = True) -> str | None:
    """Return the path of the checkpoint with the weights at the end of the run.

    Args:
        warns: whether to log a warning if the store has none.
    """
    if store is None:
        return None
    newest = store.newest
    if newest is not None and not (isinstance(newest, tuple) and len(newest) == 2):
        why = f"its `newest` is {shown(newest)}; it must be the step and the path of a checkpoint, or None"
        raise UserError.one(f"{type(store).__module__}.{type(store).__qualname__}", why, "fix its plugin")
    step, path = newest or (None, None)
    if step == end.step:
        return path
    if not warns:
        return None
    before = "there is no checkpoint" if step is None else f"the newest checkpoint is of step {step}"
    log.warning("the weights after step %d were not saved: %s", end.step, before)
    return None


def print_next_commands(commands: list[NextCommand]) -> None:
    """Print the commands that the user may want next, one a line, to be copied into a shell."""
    if not commands:
        return
    lines = [(command.purpose, shell_command(command.arguments)) for command in commands]
    width = max(len(purpose) for purpose, _ in lines)
    print("next:")
    for purpose, line in lines:
        say(f"  {purpose:<{width}}  {line}")
    sys.stdout.flush()
