"""Starts the ranks of a job on this machine through torch's elastic agent."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from titan_core.api import hookspecs
from titan_core.api.errors import EXIT_INTERRUPTED
from titan_core.api.job import Job
from titan_core.api.launcher import OUTCOMES, interrupted_line, lock_for_ranks, own_command
from titan_core.api.processes import environment_of_child
from titan_launch.rendezvous import handler, options_of, rendezvous_errors, require_meeting_point

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from titan_launch.agent import RankAgent

log = logging.getLogger(__name__)

ROLE = "rank"


def launch(
    settings: argparse.Namespace,
    per_node: int,
    machines: tuple[int, int],
    rank_arguments: Sequence[str],
    job: Job,
    folder_to_lock: str | None,
) -> int:
    """Run ``titan`` with the same arguments in every process; return the exit status.

    Args:
        settings: the options of :func:`titan_launch.options.arguments`, with their defaults.
        per_node: number of processes on this machine.
        machines: minimum and maximum number of machines.
        rank_arguments: the command line of each rank after ``titan``.
        folder_to_lock: the run directory, if the ranks write to it.

    Raises:
        UserError: the machines do not meet, or another job writes to the run directory.
    """
    least, most = machines
    options = options_of(settings, least, most)
    require_meeting_point(options)
    # Divide the cores among the ranks. torch's agent would set 1 thread per rank.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node)))
    # A shared store outlives the ranks: restarted gloo ranks find the keys of the old ones and cannot connect (torch 2.15).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with ExitStack() as stack:
        if most == 1 and folder_to_lock is not None:  # with several machines, only the one with rank 0 writes there
            stack.enter_context(lock_for_ranks(folder_to_lock))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="titan-ranks-", ignore_cleanup_errors=True)))
        _quiet_torch()
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        from titan_launch.agent import RankAgent

        with rendezvous_errors(options):
            spec = WorkerSpec(
                role=ROLE,
                local_world_size=per_node,
                entrypoint=sys.executable,
                args=("-u", "-m", "titan_core", *rank_arguments),
                rdzv_handler=handler(options, str(uuid.uuid4())),
                max_restarts=settings.max_restarts,
                monitor_interval=0.1,
                master_addr=options.master[0],
                master_port=options.master[1],
            )
            agent = RankAgent(spec, machines, folder, lambda began: _diagnose(job, began))
            # Ranks inherit the environment of this process from torch's agent.
            for name, value in {**environment_of_child(), OUTCOMES: str(agent.outcomes_folder)}.items():
                os.environ[name] = value
                stack.callback(os.environ.pop, name, None)
            return _run(agent, spec)


def _run(agent: RankAgent, spec: WorkerSpec) -> int:
    """Wait until the ranks have ended; return the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from titan_launch.agent import JobInterrupted

    close_rendezvous = True
    try:
        agent.run(ROLE)
    except SignalException as error:
        close_rendezvous = False  # other machines may continue without this one
        print(f"titan: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except JobInterrupted:
        if agent.failure is None:
            print("titan: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
    finally:
        if close_rendezvous:
            try:
                spec.rdzv_handler.shutdown()
            except RendezvousError as error:
                log.warning("cannot close the rendezvous: %s", error)
    if agent.failure is not None:
        for line in agent.failure.lines:
            print(f"titan: {line}", file=sys.stderr)
        return agent.failure.status
    interrupted = next((outcome for outcome in agent.outcomes.values() if outcome.interrupted), None)
    if interrupted is not None:
        print(f"titan: {interrupted_line(interrupted, own_command())}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _diagnose(job: Job, since: float) -> str | None:
    """Call :func:`titan_core.api.hookspecs.titan_diagnose`. Log an exception from a plugin's hook, so that the cause of the
    failure is still printed."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    for module, _ in job.registry.modules():
        plugins.register(module)
    try:
        found: str | None = plugins.hook.titan_diagnose(run=job.dump_folder, since=since)
    except Exception:  # a plugin may raise anything
        log.exception("a plugin failed in titan_diagnose")
        return None
    return found


def _quiet_torch() -> None:
    """Silence the warnings and tracebacks of torch's agent and stores: titan reports each failure in one line."""
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch.distributed  # noqa: F401 - reads the level

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks must not inherit it
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
