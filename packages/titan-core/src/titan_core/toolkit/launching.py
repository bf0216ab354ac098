"""Launchers, which start the ranks of a job, and the data that they exchange with the ranks. Free of torch.

A rank is ``python -m titan_core`` with the arguments in :attr:`~titan_core.api.CommandContext.rank_arguments` and
torchrun's environment variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``). A launcher
that also sets :data:`OUTCOMES` reports how the job ended; its ranks then print nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from titan_core.api import CommandContext, Component, Ref, UserError
from titan_core.api.config.numbers import MOST_RANKS
from titan_core.api.config.secrets import redact_arguments
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import parse_integer
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.plugin_files import OPTION, plugin_options
from titan_core.toolkit.processes import process_began
from titan_core.toolkit.runs.files import LOGS
from titan_core.toolkit.status import ERASE, hide_all
from titan_core.toolkit.text import ranks

OUTCOMES = "TITAN_OUTCOMES"
"""Environment variable: folder in which the launcher expects the outcomes of its ranks (``rank-N.json``)."""
RANK_LOGS = "TITAN_RANK_LOGS"
"""Environment variable: folder in which the launcher keeps the output of its ranks (``rank-N.log``)."""
LOCKED = "TITAN_LOCKED"
"""Environment variable: run directory that the launcher has locked for its ranks."""
RESTART = "TITAN_RESTART"
"""Environment variable of the ranks of a restarted job: what the launcher knows about the restart, as JSON."""
BEGAN = "TITAN_BEGAN"
"""Environment variable: :class:`Began` of the ranks of a launcher, as two numbers."""
COMMAND = "TITAN_COMMAND"
"""Environment variable: :func:`user_command` of the launcher, as JSON."""
LOCAL_ADDRESS = "TITAN_LOCAL_ADDR"
"""Environment variable: address or name at which other machines reach this one, where its host name does not serve. Titan's
launcher sets it to ``--local-addr``."""
JOB_KEY = "TITAN_JOB_KEY"
"""Environment variable: the key that the machines of a job share, and by which their launchers know each other."""
LISTENER = "TITAN_LISTENER"
"""Environment variable of rank 0: descriptor of a socket that is bound to ``MASTER_ADDR`` and ``MASTER_PORT``, for the store
of the ranks. Without it, the store listens on all addresses."""
CONFINED = "TITAN_CONFINED"
"""Environment variable: names of those by which the launcher of a job of one machine keeps gloo and NCCL to loopback."""
INTERRUPTED = "titan: interrupted: stopping after this step; Ctrl-C again ends at once"


@dataclass(frozen=True, kw_only=True)
class Launcher(Component):
    """A way to start the ranks of a job from ``titan train``."""

    kind = "launcher"
    arguments: Ref[Callable[[argparse.ArgumentParser], None]]
    """Adds the launcher's options, all optional, to ``titan train``. Called more than once; must not import torch."""
    run: Ref[Callable[[CommandContext, RankJob], int]]
    """Starts the ranks, waits for them and returns the exit status. Called if one of the launcher's options differs from its
    default; otherwise this process trains, or another launcher starts the ranks."""
    commands: tuple[str, ...] = ()
    """Names of the commands that take its options (default: all that run on several ranks)."""


@dataclass(frozen=True)
class RankJob:
    """The job of a command that runs on several ranks."""

    assemble: Callable[[int | None], AssembledJob]
    """Assembles the job for a number of ranks (``None``: the fewest that it allows), so that mistakes are reported once,
    before any rank is started."""
    writes_run: bool = True
    """Whether the ranks write to the job's run directory. The launcher then locks it on their behalf."""


class Began(NamedTuple):
    """When an attempt began, in seconds since the epoch."""

    launcher: float
    """When its launcher did, the same for all attempts of one launcher; without a launcher, the rank itself."""
    attempt: float
    """When the attempt before failed if the launcher restarted the ranks, else the same."""

    def as_text(self) -> str:
        """Return the value of :data:`BEGAN`."""
        return " ".join(map(str, self))


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended on one rank."""

    rank: int
    step: int = 0
    """The last step that the rank started."""
    begun: int = 0
    """The step after which the attempt started."""
    problems: tuple[str, ...] = ()
    """The failures, one line each; empty if there were none."""
    follows: bool = False
    """Whether the problems only report that another rank is lost or late."""
    status: int = 0
    """The exit status for the failure (:func:`titan_core.toolkit.errors.exit_status`); 0 if there was none."""
    log: str = ""
    """File with the traceback; empty if the problems are self-explanatory."""
    interrupted: bool = False
    """Whether a person stopped the rank, and it ended cleanly."""
    checkpoint: str = ""
    """The checkpoint of the last step if the run ended cleanly, the newest one if it failed; empty if there is none."""
    time: float = 0.0
    """Seconds since the epoch."""


def leave_loopback() -> None:
    """Let gloo and NCCL use the network although this job runs on one machine, for a rank that other jobs connect to. Call
    it before the ranks join, as in ``titan_job_assembled``."""
    for name in filter(None, os.environ.pop(CONFINED, "").split(",")):
        os.environ.pop(name, None)


def reported_by_launcher() -> bool:
    """Whether a launcher reports the outcome of this process, which is one of its ranks."""
    return OUTCOMES in os.environ


def began() -> Began:
    """Return when the attempt began of which this process is a rank."""
    given = os.environ.get(BEGAN)
    if given is None:
        return Began(*2 * (process_began(),))
    launcher, attempt = map(float, given.split())
    return Began(launcher, attempt)


def place_in_environment() -> tuple[int, int]:
    """Return rank and world size, as set by a launcher such as torchrun; 0 and 1 without a launcher.

    Raises:
        UserError: only one of the variables is set, or the values are invalid.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, 1
    place = parse_integer(rank or "", 0, MOST_RANKS - 1)
    ranks = parse_integer(world_size or "", 1, MOST_RANKS)
    if place is None or ranks is None or place >= ranks:
        raise UserError.one(
            f"environment: RANK = {rank!r}, WORLD_SIZE = {world_size!r}",
            "both must be whole numbers, with RANK below WORLD_SIZE",
            "start with a launcher such as torchrun, or unset both",
        )
    return place, ranks


def rank_log(run: str | Path, rank: int) -> Path:
    """Return the log of a rank: the launcher writes its output there, and the rank the traceback of its error."""
    return Path(os.environ.get(RANK_LOGS) or Path(run) / LOGS) / f"rank-{rank}.log"


@contextmanager
def lock_for_ranks(folder: str) -> Iterator[None]:
    """Lock a run directory on behalf of the processes started inside the context, which then do not lock it themselves. The
    lock outlives ranks that fail and are restarted.

    Raises:
        UserError: another job writes to the directory.
    """
    with FolderLock(Path(folder), f"job.dump_folder = {folder!r}", restarted=RESTART in os.environ):
        os.environ[LOCKED] = str(Path(folder).resolve())
        try:
            yield
        finally:
            del os.environ[LOCKED]


def unless_locked(folder: str) -> AbstractContextManager[object]:
    """Lock a run directory, unless a process that started this one has locked it for it."""
    locked = os.environ.get(LOCKED) == str(Path(folder).resolve())
    return nullcontext() if locked else FolderLock(Path(folder), f"run {folder!r}")


def report_lines(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield one line per distinct problem, with the ranks that have it and the log of the first of them."""
    by_problem: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.time):
        for problem in outcome.problems:
            by_problem.setdefault(problem, []).append(outcome)
    for problem, affected in by_problem.items():
        first = affected[0]
        stopped = problem.startswith("stopped: ")
        who = "" if stopped or not first.log else f"{ranks(outcome.rank for outcome in affected)} in step {first.step}: "
        where = f"; the traceback is in {first.log}" if first.log else ""
        yield f"{'' if stopped else 'error: '}{who}{problem}{where}"


def interrupted_line(outcome: Outcome, command: str) -> str:
    """Return the line that reports where an interrupted run stopped.

    Args:
        command: the command that resumes the run.
    """
    if outcome.checkpoint:
        return f"interrupted after step {outcome.step}, saved in {outcome.checkpoint}; to resume: {command}"
    if outcome.step == outcome.begun:
        return f"interrupted before step {outcome.step + 1}; nothing was trained since the start"
    return f"interrupted after step {outcome.step}; nothing was saved: checkpoints are disabled (checkpoint.enable)"


def resume_line(outcomes: Iterable[Outcome], command: str) -> str:
    """Return the line after the errors of a failed run: how to resume it. Empty if it has no checkpoint."""
    has_checkpoint = any(outcome.checkpoint or outcome.begun for outcome in outcomes)
    return f"to resume from the newest checkpoint: {command}" if has_checkpoint else ""


def user_command() -> tuple[list[str], list[str] | None]:
    """Return the command that the user started this process with, or the job that it is a rank of: how to run ``titan`` in
    that shell, and its arguments without secrets (``None`` for a rank of another launcher than Titan's)."""
    given = os.environ.get(COMMAND)
    if given is not None:
        program, arguments = json.loads(given)
        return program, arguments
    program = ["python", "-m", "titan_core"] if Path(sys.argv[0]).name == "__main__.py" else ["titan"]
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # set by `uv run`, without which the shell may not find the program
        program = ["uv", "run", *program]
    options = plugin_options()
    arguments = sys.argv[1:]
    while options and arguments and arguments[0].partition("=")[0] == OPTION:
        del arguments[: 1 if "=" in arguments[0] else 2]
    return [*program, *options], None if "RANK" in os.environ else redact_arguments(arguments)


def shell_command(arguments: Iterable[str]) -> str:
    """Return the line that runs ``titan`` with ``arguments`` in the user's shell."""
    return shlex.join([*user_command()[0], *arguments])


def own_command() -> str:
    """Return the command that started this process, quoted for a shell and without secrets."""
    return shell_command(user_command()[1] or redact_arguments(sys.argv[1:]))


def announce_interrupt(line: str) -> None:
    """Print the effect of the first Ctrl-C, and show no progress from then on, because the next Ctrl-C ends the process at
    once. Safe in a signal handler, where ``print`` and logging are not."""
    hide_all()
    erase = f"{ERASE}\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar of a library may have hidden the cursor
    with suppress(OSError):  # nobody reads it
        os.write(2, f"{erase}{line}\n".encode())
