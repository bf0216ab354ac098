"""``titan train``: trains in this process, alone or as one of several ranks, or runs a launcher."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

from titan_core.api import CommandContext, RunStopped, UserError
from titan_core.api._shown import printable
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.loop.gc_settings import gc_as_before
from titan_core.plugins.registry import Components
from titan_core.runlog.run_directory import early_lock
from titan_core.toolkit.errors import EXIT_DATA_ENDED, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PREEMPTED, exit_status
from titan_core.toolkit.launching import (
    Launcher,
    RankJob,
    began,
    interrupted_line,
    own_command,
    place_in_environment,
    reported_by_launcher,
    resume_line,
)
from titan_core.toolkit.output import continue_without
from titan_core.toolkit.processes import end_with_parent
from titan_core.toolkit.status import StatusLine, phase
from titan_core.toolkit.text import log_to_stderr, say

if TYPE_CHECKING:
    from titan_core.api import RunEnd


def run(context: CommandContext) -> int:
    """Run a launcher if its options are set; else assemble the job and train it in this process."""
    end_with_parent()
    continue_without()
    launcher: Launcher | None = context.arguments.launcher
    warned: set[str] = set()

    def assembled(world_size: int | None) -> AssembledJob:
        job = context.job(world_size)
        _warn_of_broken(job, warned)
        return job

    if launcher is not None:
        return launcher.run.call(int, context, RankJob(assembled))
    rank, world_size = place_in_environment()
    # Ranks of Titan's launcher each have a log of their own.
    with StatusLine() if rank == 0 or reported_by_launcher() else nullcontext():
        with phase("reading the recipe"):
            job = assembled(world_size) if rank == 0 and not reported_by_launcher() else context.job(world_size)
        log_to_stderr()
        for name in {module.__name__.partition(".")[0] for module, _ in job.registry.modules()}:
            logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.ERROR)

        with gc_as_before(), _early_lock(job, rank):
            with phase("importing torch"):
                gc.disable()  # loading modules leaves no garbage
                first = "torch" not in sys.modules
                import titan_core.loop.training  # noqa: F401

                if first:  # otherwise, what is left of an earlier job of this process would never be freed
                    gc.freeze()  # collections skip the modules
                gc.enable()
            return _train_alone(job) if "RANK" not in os.environ else _train_rank(job, rank)


def _warn_of_broken(job: AssembledJob, warned: set[str]) -> None:
    """Print one line about the installed plugins that failed to load, which the job does not need but its user may expect.

    Args:
        warned: receives the line, which is not printed again.
    """
    broken = cast(Components, job.registry).found.broken
    names = ", ".join(f"{plugin.name!r} ({plugin.distribution} {plugin.version})" for plugin in broken)
    line = f"titan: warning: failed to load and not in use: plugin {names}; see `titan plugins`"
    if broken and line not in warned:
        warned.add(line)
        say(printable(line), file=sys.stderr)


@contextmanager
def _early_lock(job: AssembledJob, rank: int) -> Iterator[None]:
    """Take :func:`~titan_core.runlog.run_directory.early_lock`. The launcher reports why a rank could not.

    Raises:
        UserError: another job writes to the directory.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(early_lock(job.dump_folder))
        except UserError as error:
            if reported_by_launcher():
                from titan_core.loop.outcome import OutcomeRecorder

                OutcomeRecorder(rank, job.dump_folder).failed(error)
            raise
        yield


def _train_alone(job: AssembledJob) -> int:
    """Train in one process without a launcher. Unexpected errors end in a traceback."""
    from titan_core.loop.outcome import OutcomeRecorder
    from titan_core.loop.training import train

    recorder = OutcomeRecorder(0, job.dump_folder, keeps_log=False)
    try:
        end = train(job, [recorder], next_commands=True, began=began())
    except Exception as error:
        line = resume_line([recorder.outcome], own_command())
        if not isinstance(error, RunStopped):
            if line:
                error.add_note(line)  # printed after the error
            status = exit_status(error)
            if status == EXIT_FAILURE or isinstance(error, UserError):
                raise
            traceback.print_exception(error)
            return status
        say("\n".join(filter(None, (f"titan: stopped: {error}", line and f"titan: {line}"))), file=sys.stderr)
        return error.exit_status
    if end.interrupted:
        say(f"titan: {interrupted_line(recorder.outcome, own_command())}", file=sys.stderr)
    return _status(end)


def _train_rank(job: AssembledJob, rank: int) -> int:
    """Train as one of several ranks. Errors go to the rank's log, and as one line to the launcher."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from titan_core.loop.outcome import OutcomeRecorder
    from titan_core.loop.training import train

    recorder = OutcomeRecorder(rank, job.dump_folder)
    # ``record`` writes the error for torchrun.
    run: Callable[..., RunEnd | None] = record(train) if "TORCHELASTIC_RUN_ID" in os.environ else train
    try:
        end = run(job, [recorder], next_commands=True, began=began())
    except Exception as error:
        recorder.failed(error)
        if os.environ.get("TITAN_TRACEBACK"):
            raise
        if not reported_by_launcher():
            recorder.print()
        return exit_status(error)
    except KeyboardInterrupt:
        if reported_by_launcher():
            return EXIT_INTERRUPTED
        raise
    if end is None or not end.interrupted:
        return _status(end)
    if reported_by_launcher():
        return 0  # torch's agent would restart the ranks after any other status
    if rank == 0:
        line = interrupted_line(recorder.outcome, "start the job again with the same command")
        say(f"titan: {line}", file=sys.stderr)
    return EXIT_INTERRUPTED


def _status(end: RunEnd | None) -> int:
    if end is None:
        return 0
    if end.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_PREEMPTED if end.preempted else EXIT_DATA_ENDED if end.data_ended else 0
