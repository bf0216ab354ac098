"""Launchers, which start the ranks of a job, and what passes between them and the ranks. Free of torch.

A rank is ``python -m titan_core train RECIPE OVERRIDES`` with torchrun's environment variables (``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``). A launcher that also sets :data:`OUTCOMES` reports how the job ended; its
ranks then print nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_core.api.command import CommandContext
from titan_core.api.components import Component
from titan_core.api.ref import Ref
from titan_core.api.runs.folder_lock import FolderLock
from titan_core.api.tools.rank_names import ranks
from titan_core.api.tools.secrets import arguments_without_secrets

OUTCOMES = "TITAN_OUTCOMES"
"""Environment variable: the folder in which a launcher expects the outcomes of its ranks (``rank-N.json``)."""
LOCKED = "TITAN_LOCKED"
"""Environment variable: the run directory that a rank's launcher has locked."""
INTERRUPTED = "titan: interrupted: stopping after this step; Ctrl-C again ends at once"


@dataclass(frozen=True, kw_only=True)
class Launcher(Component):
    """A way to start the ranks of a job from ``titan train``."""

    kind = "launcher"
    arguments: Ref[Callable[[argparse.ArgumentParser], None]]
    """Adds its options, none of them required, to those of ``titan train``. Called more than once; free of torch."""
    run: Ref[Callable[[CommandContext], int]]
    """Starts the ranks, waits for them and returns the exit status. Called where one of its options has another value than
    its default; otherwise this process trains, or another launcher starts the ranks."""


@dataclass(frozen=True)
class Outcome:
    """How one rank's part of an attempt ended."""

    rank: int
    step: int = 0
    """The last step that it began."""
    begun: int = 0
    """The step that it began after."""
    problems: tuple[str, ...] = ()
    """What failed, one line each; empty if nothing did."""
    follows: bool = False
    """Whether the problems only say that another rank is gone or late."""
    log: str = ""
    """The file with the traceback; empty where the problems say everything."""
    interrupted: bool = False
    """Whether a person stopped it, and it ended in good order."""
    checkpoint: str = ""
    """The checkpoint of its last step, if one was saved."""
    time: float = 0.0
    """Seconds since the epoch."""


def reported_by_launcher() -> bool:
    """Whether this process is a rank whose launcher reports its outcome."""
    return OUTCOMES in os.environ


@contextmanager
def lock_for_ranks(folder: str) -> Iterator[None]:
    """Lock a run directory on behalf of the processes started inside the context, which then do not lock it themselves: the
    lock outlives ranks that fail and are restarted.

    Raises:
        UserError: another job writes there.
    """
    with FolderLock(Path(folder), f"job.dump_folder = {folder!r}"):
        os.environ[LOCKED] = str(Path(folder).resolve())
        try:
            yield
        finally:
            del os.environ[LOCKED]


def report_lines(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """One line for each distinct problem, with the ranks that have it and the log of the first of them."""
    by_problem: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda one: one.time):
        for problem in outcome.problems:
            by_problem.setdefault(problem, []).append(outcome)
    for problem, those in by_problem.items():
        first = those[0]
        stopped = problem.startswith("stopped: ")
        who = "" if stopped or not first.log else f"{ranks(one.rank for one in those)} in step {first.step}: "
        where = f"; the traceback is in {first.log}" if first.log else ""
        yield f"{'' if stopped else 'error: '}{who}{problem}{where}"


def interrupted_line(outcome: Outcome, command: str) -> str:
    """Where an interrupted run stands.

    Args:
        command: resumes it.
    """
    if outcome.checkpoint:
        return f"interrupted after step {outcome.step}, saved in {outcome.checkpoint}; to resume: {command}"
    if outcome.step == outcome.begun:
        return f"interrupted before step {outcome.step + 1}; nothing was trained since the start"
    return (
        f"interrupted after step {outcome.step}; nothing was saved, since the job keeps no checkpoints (checkpoint.enable)"
    )


def own_command() -> str:
    """The command that started this process, quoted for a shell and without secrets."""
    return shlex.join(["titan", *arguments_without_secrets(sys.argv[1:])])


def announce_interrupt(line: str = INTERRUPTED) -> None:
    """Print what the first Ctrl-C does. Safe in a signal handler, where ``print`` and logging are not."""
    release_terminal()
    os.write(2, f"{line}\n".encode())


def release_terminal() -> None:
    """Begin a line below a progress bar and show the cursor, which the bar hides until it is closed: its process may be
    killed before that. Safe in a signal handler; writes nothing if stderr is no terminal."""
    if sys.stderr.isatty():
        os.write(2, b"\n\x1b[?25h")
