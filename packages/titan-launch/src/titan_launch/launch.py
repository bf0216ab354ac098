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
from typing import TYPE_CHECKING, Any, cast

from titan_core.api import UserError
from titan_core.toolkit.errors import EXIT_INTERRUPTED, EXIT_LOST_PEER, EXIT_USER_ERROR
from titan_core.toolkit.hookspecs import hook_manager
from titan_core.toolkit.jobs import AssembledJob
from titan_core.toolkit.launching import (
    COMMAND,
    CONFINED,
    LOCAL_ADDRESS,
    OUTCOMES,
    RANK_LOGS,
    interrupted_line,
    lock_for_ranks,
    own_command,
    resume_line,
    user_command,
)
from titan_core.toolkit.listening import is_loopback, loopback_networks
from titan_core.toolkit.open_files import allow_open_files
from titan_core.toolkit.processes import environment_of_child, python
from titan_core.toolkit.runs.files import LOGS
from titan_core.toolkit.sections import CommSection
from titan_core.toolkit.status import phase
from titan_core.toolkit.text import shorten
from titan_launch.config import NUMA_BINDING
from titan_launch.console import Console
from titan_launch.meeting_point import handler, require_meeting_point
from titan_launch.progress import StepLimits
from titan_launch.rendezvous import (
    Rendezvous,
    RendezvousClosed,
    RendezvousError,
    rendezvous_errors,
    root_cause,
)
from titan_launch.restart_policy import RestartLimits
from titan_launch.signals import Terminated
from titan_launch.status_line import StatusLine

if TYPE_CHECKING:
    from titan_launch.agent import RankAgent
    from titan_launch.handler import Handler
    from titan_launch.sizes import Sizes

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
        from titan_launch.agent import RankAgent
        from titan_launch.rank_logs import RankLogs

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
            environment = environment_of_ranks(settings, options, per_node, outcomes, log_folder)
            command = python("-u", "-m", "titan_core", *rank_arguments)
            of_agent = (
                command, per_node, environment, options, _handler(options), outcomes, logs, console,
                lambda began: _diagnose(job, began), writes_run,
                RestartLimits(settings.max_restarts, settings.restart_wait, settings.restart_wait_max), _step_limits(job),
                settings.grace,
            )  # fmt: skip
            ended = _run(RankAgent(*of_agent) if sizes is None else elastic_agent(settings, of_agent, sizes), options)
        if is_temporary and ended in (0, EXIT_USER_ERROR, EXIT_INTERRUPTED):
            shutil.rmtree(log_folder)
        return ended


def _handler(options: Rendezvous) -> Handler | None:
    """Return the handler of the rendezvous; ``None`` if this machine meets no other.

    Raises:
        UserError: see :func:`titan_launch.meeting_point.handler`.
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


def elastic_agent(settings: argparse.Namespace, of_agent: tuple[Any, ...], sizes: Sizes) -> RankAgent:
    """Return the agent of an elastic job."""
    from titan_launch.elastic import ElasticAgent

    return ElasticAgent(*of_agent, sizes=sizes, when_impossible=settings.elastic)


def _log_folder(requested: str | None, run: str | None) -> tuple[Path, str]:
    """Return the folder for the logs of the ranks, and what names it."""
    if requested is not None:
        return Path(requested), f"--log-dir {shorten(requested)}"
    if run is not None:
        return Path(run) / LOGS, f"job.dump_folder = {run!r}"
    return Path(tempfile.mkdtemp(prefix="titan-logs-")), "the folder for temporary files"


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _run(agent: RankAgent, options: Rendezvous) -> int:
    """Run the job until its end, or until a signal ends this process; return the exit status.

    Raises:
        RendezvousError: the machines did not meet. Once they have, the loss of the rendezvous is that of a peer.
    """
    try:
        with agent.signals:
            return _wait(agent, options)
    except Terminated as error:
        agent.leave()  # other machines may continue without this one
        agent.logs.end_attempt()
        agent.console.say(f"ended by {error.number.name}")
        return 128 + error.number


def _wait(agent: RankAgent, options: Rendezvous) -> int:
    """Wait until the ranks have ended; return the exit status.

    Raises:
        RendezvousError: the machines did not meet. Once they have, the loss of the rendezvous is that of a peer.
    """
    from titan_launch.agent import JobEnded, JobInterrupted
    from titan_launch.elastic import ElasticAgent, StoreLost

    logs, console = agent.logs, agent.console
    close_rendezvous = interrupted = True
    mistake: UserError | None = None
    try:
        while True:
            try:
                agent.run()
                break
            except StoreLost:
                assert isinstance(agent, ElasticAgent)
                close_rendezvous = False  # nobody is there
                logs.end_attempt()
                seconds = options.timeout
                console.say(f"the rendezvous at {options.endpoint} has gone; waiting {seconds} s for it to return")
                try:
                    require_meeting_point(options, seconds)
                    agent.reconnect(handler(options, seconds))
                except UserError as error:
                    console.say(f"error: {error}")
                    return EXIT_LOST_PEER
                close_rendezvous = True
        interrupted = False
    except JobEnded:
        interrupted = False
    except Terminated:
        close_rendezvous = False  # see _run
        raise
    except RendezvousError as error:
        if not agent.started:
            raise
        # The options were right: the machine where all meet has ended, the others do not come back, or the job is over.
        close_rendezvous = False
        logs.end_attempt()
        status = EXIT_LOST_PEER
        if not isinstance(error, RendezvousClosed):
            why = f"--rdzv-endpoint {options.endpoint}: the rendezvous is lost ({root_cause(error)})"
            console.say(f"error: {why}; start titan again here, and on the machine that hosts it")
        elif agent.failure is None:
            console.say("error: the job has ended on another machine, whose output says why")
        else:
            status = agent.failure.status
            console.say(f"{agent.failure.lines[-1]}; not restarted, because the job has ended on another machine")
        if line := resume_line(agent.outcomes.values(), own_command()):
            console.say(line)
        return status
    except UserError as error:
        mistake = error
        raise
    except JobInterrupted:
        pass
    finally:
        if close_rendezvous and agent.trains:
            try:
                agent.close(*_end_of(agent, mistake, interrupted))
            except RendezvousError as error:
                log.warning("cannot close the rendezvous: %s", error)
    logs.end_attempt()
    if agent.failure is not None:
        for line in agent.failure.lines:
            console.say(line)
        if line := resume_line(agent.outcomes.values(), own_command()):
            console.say(line)
        return agent.failure.status
    stopped = next((outcome for outcome in agent.outcomes.values() if outcome.interrupted), None)
    if interrupted or stopped is not None:
        console.say("interrupted" if interrupted or stopped is None else interrupted_line(stopped, own_command()))
        return EXIT_INTERRUPTED
    return 0


def _end_of(agent: RankAgent, mistake: UserError | None, interrupted: bool) -> tuple[int, str]:
    """Return the exit status of a job that ends on this machine, and a line that says why if it is not 0."""
    if mistake is not None:
        return EXIT_USER_ERROR, str(mistake)
    if agent.failure is not None:
        return agent.failure.status, agent.failure.lines[-1]
    if interrupted or any(outcome.interrupted for outcome in agent.outcomes.values()):
        return EXIT_INTERRUPTED, "the job was interrupted"
    return 0, ""


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
        found: str | None = plugins.hook.titan_diagnose(run=job.dump_folder, since=since)
    except UserError as error:
        log.error("%s", error)
        return None
    return found


def _import_torch() -> None:
    """Import torch's store without its warnings and tracebacks: titan reports each failure in one line."""
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch.distributed  # noqa: F401 - reads the level

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks must not inherit it
