"""Starts the ranks of a job on this machine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from titan_core.api import UserError
from titan_core.api.config.sections import CommSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from titan_core.toolkit.hookspecs import hook_manager
from titan_core.toolkit.launching import (
    COMMAND,
    CONFINED,
    LOCAL_ADDRESS,
    OUTCOMES,
    RANK_LOGS,
    lock_for_ranks,
    user_command,
)
from titan_core.toolkit.listening import is_loopback, loopback_networks
from titan_core.toolkit.open_files import allow_open_files
from titan_core.toolkit.own_files import require_inside
from titan_core.toolkit.processes import environment_of_child, python
from titan_core.toolkit.runs.files import LOGS
from titan_core.toolkit.status import StatusLine, phase
from titan_core.toolkit.text import shorten
from titan_launch.agent import Agent
from titan_launch.config import NUMA_BINDING
from titan_launch.meeting.machines import Machines
from titan_launch.meeting.meeting_point import handler, require_meeting_point
from titan_launch.meeting.rendezvous import Rendezvous, rendezvous_errors
from titan_launch.ranks.logs import RankLogs
from titan_launch.ranks.progress import StepLimits
from titan_launch.restart.policy import RestartLimits, RestartPolicy
from titan_launch.terminal.console import Console

if TYPE_CHECKING:
    from titan_launch.meeting.handler import Handler
    from titan_launch.meeting.sizes import Sizes

log = logging.getLogger(__name__)

HANG = 1.25
"""Share of the collectives' timeout that a step may take."""


def launch(
    settings: argparse.Namespace,
    options: Rendezvous,
    per_node: int,
    rank_arguments: Sequence[str],
    job: AssembledJob,
    writes_run: bool,
    status: StatusLine,
    sizes: Sizes | None = None,
) -> int:
    """Run ``titan`` with the same arguments in every process; return the exit status.

    Args:
        settings: the options of :func:`titan_launch.options.arguments`, with their defaults.
        options: where the machines meet, and how many.
        per_node: number of processes on this machine.
        rank_arguments: the command line of each rank after ``titan``.
        writes_run: whether the ranks write to the run directory, which this process then locks.
        status: the status line that is shown until the ranks print something.
        sizes: the numbers of ranks that an elastic job can train on.

    Raises:
        UserError: the machines do not meet, the logs cannot be written, too few files may be open, or another job writes to
            the run directory.
    """
    machines = options.machines
    # Of each rank: pipes, logs and a connection to the store. Of each machine: connections to the rendezvous.
    allow_open_files(8 * per_node + 4 * machines[1])
    require_meeting_point(options)
    with ExitStack() as stack:
        if machines[1] == 1 and writes_run:  # with several machines, only the one with rank 0 writes there
            stack.enter_context(lock_for_ranks(job.dump_folder))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="titan-ranks-", ignore_cleanup_errors=True)))
        console = Console(status)
        stack.callback(console.close)
        is_temporary = not writes_run and settings.log_dir is None  # removed, unless a rank failed and its log says why
        log_folder, where = _log_folder(settings.log_dir, job.dump_folder if writes_run else None)
        if is_temporary:
            stack.callback(_remove_if_empty, log_folder)
        logs = RankLogs(log_folder, where, console, settings.shown)
        stack.callback(logs.end_attempt)
        outcomes = folder / "outcomes"
        with rendezvous_errors(options):
            agent = Agent(
                command=python("-u", "-m", "titan_core", *rank_arguments),
                environment=environment_of_ranks(settings, options, per_node, outcomes, log_folder),
                machines=Machines(options, per_node, _handler(options), console, sizes, settings.elastic),
                outcomes=outcomes,
                logs=logs,
                console=console,
                diagnose=lambda began: _diagnose(job, began),
                restart_policy=RestartPolicy(
                    RestartLimits(settings.max_restarts, settings.restart_wait, settings.restart_wait_max)
                ),
                step_limits=_step_limits(job),
                grace=settings.grace,
                trains=writes_run,
            )
            ended = agent.run()
        if is_temporary and ended in (0, EXIT_USER_ERROR, EXIT_INTERRUPTED):
            shutil.rmtree(log_folder)
        return ended


def _handler(options: Rendezvous) -> Handler | None:
    """Return the handler of the rendezvous; ``None`` if this machine meets no other.

    Raises:
        UserError: see :func:`titan_launch.meeting.meeting_point.handler`.
    """
    if not options.endpoint:
        return None
    with phase("preparing to meet the other machines"):
        _import_torch()
        return handler(options)


def environment_of_ranks(
    settings: argparse.Namespace, options: Rendezvous, per_node: int, outcomes: Path, log_folder: Path
) -> dict[str, str]:
    """Return the variables of ranks, beside those of this process."""
    found = {OUTCOMES: str(outcomes), RANK_LOGS: str(log_folder), COMMAND: json.dumps(user_command())}
    if options.local_addr is not None:
        found[LOCAL_ADDRESS] = options.local_addr
    if settings.numa_binding is not None:
        found[NUMA_BINDING] = settings.numa_binding
    if not options.endpoint and (options.bind is None or is_loopback(options.bind)):
        networks = loopback_networks()
        found |= networks | {CONFINED: ",".join(networks)}
    # Divide the cores among the ranks. NCCL's default is another one than torchrun's.
    for name, value in (
        ("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node))),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    ):
        found[name] = os.environ.get(name, value)
    return {**environment_of_child(), "PYTHONSAFEPATH": "1", **found}


def _step_limits(job: AssembledJob) -> StepLimits:
    comm = job.config.section(CommSection)
    return StepLimits(HANG * comm.init_timeout_seconds, HANG * comm.train_timeout_seconds)


def _log_folder(requested: str | None, run: str | None) -> tuple[Path, str]:
    """Return the folder for the logs of the ranks, and what names it."""
    if requested is not None:
        return Path(requested), f"--log-dir {shorten(requested)}"
    if run is not None:
        require_inside(Path(run), [LOGS])
        return Path(run) / LOGS, f"job.dump_folder = {run!r}"
    return Path(tempfile.mkdtemp(prefix="titan-logs-")), "the folder for temporary files"


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _diagnose(job: AssembledJob, since: float) -> str | None:
    """Call :func:`titan_core.toolkit.hookspecs.titan_diagnose`. Log the failure of a plugin's hook, so that the cause of the
    failure is still printed."""
    plugins = hook_manager()
    origins = dict(job.registry.modules())
    for module in origins:
        plugins.register(module)
    for one in plugins.hook.titan_diagnose.get_hookimpls():
        guarded = origins[cast(ModuleType, one.plugin)].guard_hook("titan_diagnose", one.function, one.wrapper)
        setattr(one, "function", guarded)  # noqa: B010 - public, but declared final
    try:
        found = plugins.hook.titan_diagnose(run=job.dump_folder, since=since)
    except UserError as error:
        log.error("%s", error)
        return None
    return None if found is None else str(found)


def _import_torch() -> None:
    """Import torch's store without its warnings and tracebacks: titan reports each failure in one line."""
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch.distributed  # noqa: F401 - reads the level

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks must not inherit it
