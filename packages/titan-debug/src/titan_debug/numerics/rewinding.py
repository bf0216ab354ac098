"""Going back from a loss spike while a job runs, by ``titan run rewind`` in a process of its own."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

from titan_core.api import Checkpoint, Command, UserError
from titan_core.toolkit.jobs import AssembledJob
from titan_core.toolkit.launching import LOCKED
from titan_core.toolkit.processes import python
from titan_core.toolkit.runs.run_log import RunLog

log = logging.getLogger(__name__)

_COMMAND = "run rewind"
_KEY = "numerics.spike_action"


def require_rewinding(job: AssembledJob) -> None:
    """
    Raises:
        UserError: the job cannot go back to a checkpoint.
    """
    if job.checkpoint is None:
        why = "goes back to a checkpoint, and this job saves none"
        raise UserError(job.config.problem(_KEY, why, "set checkpoint.enable = true, or another action"))
    if _COMMAND not in job.registry.names(Command):
        raise UserError(job.config.problem(_KEY, "needs `titan run rewind`", "install titan-data, or set another action"))


def rewinds_of(folder: str) -> list[int]:
    """Return the steps to which the run has gone back."""
    return [event["step"] for event in RunLog.read_events(Path(folder)) if event["event"] == "rewind"]


def rewind(job: AssembledJob, step: int) -> None:
    """Go back to the newest checkpoint before ``step``, and pass over the documents of this step. For rank 0.

    Where the run has gone back before, the cause of the spike may have begun earlier: it goes back further.

    Raises:
        UserError: there is no such checkpoint, or the documents cannot be passed over from there on.
    """
    checkpoint = job.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    find, found, upto = checkpoint.find_position, None, step - 1
    used = rewinds_of(job.dump_folder)
    while find is not None:
        found = find.load()(checkpoint.context(job), upto)
        if found is None or found.step not in used:
            break
        upto = found.step - 1
    if found is None:
        why = f"the loss spiked in step {step}, and there is no checkpoint before it to go back to"
        raise UserError(job.config.problem(_KEY, why, "lower checkpoint.interval, or set another action"))
    arguments = [*_COMMAND.split(), job.dump_folder, "--to", str(found.step), "--without-steps", str(step)]
    environment = {**os.environ, LOCKED: str(Path(job.dump_folder).resolve())}  # this process has the lock
    done = subprocess.run(
        python("-m", "titan_core", *arguments), env=environment, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines()[:-1]:  # without the command that continues the run
        log.warning("%s", line)
    if done.returncode:
        raise UserError.one(f"titan {' '.join(arguments)}", done.stderr.strip() or "failed", "rewind by hand, further back")
