"""Starting the ranks of a job on this machine. Imports torch only once a job is launched."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from titan_core.api.errors import EXIT_INTERRUPTED, UserError
from titan_core.api.job import Job
from titan_core.api.numbers import MOST_PROCESSES, MOST_RANKS
from titan_core.api.runs.parent_process import environment_of_child
from titan_core.api.tools.arguments import parse_whole
from titan_core.api.tools.secrets import arguments_without_secrets
from titan_core.api.tools.shown import shorten
from titan_core.plugins.lifecycle import Lifecycle

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from titan_core.train.agent import RankAgent

log = logging.getLogger(__name__)

ROLE = "rank"


def processes(nproc_per_node: str | None, nnodes: str) -> int | None:
    """World size, or ``None`` where the number of machines is a range.

    Raises:
        UserError: not a number.
    """
    least, most = machines(nnodes)
    return _processes_per_node(nproc_per_node) * least if least == most else None


def machines(nnodes: str) -> tuple[int, int]:
    """How many machines take part, at least and at most.

    Raises:
        UserError: neither a number nor a range.
    """
    first, colon, second = nnodes.partition(":")
    least = _number("--nnodes", first, MOST_RANKS)
    most = _number("--nnodes", second, MOST_RANKS) if colon else least
    if most < least:
        raise UserError.one(f"--nnodes {nnodes}", "the range is empty", "give the smaller number first")
    return least, most


def launch(arguments: argparse.Namespace, overrides: Sequence[str], job: Job) -> int:
    """Run ``titan train`` with the same recipe and overrides in every process; returns the exit status.

    Args:
        overrides: as they were written on the command line.

    Raises:
        UserError: the machines do not meet, or another job writes to the run's directory.
    """
    from titan_core.runlog.run_directory import lock_for_ranks
    from titan_core.train.rendezvous import handler, options_of, rendezvous_errors, require_meeting_point

    per_node = _processes_per_node(arguments.nproc_per_node)
    least, most = machines(arguments.nnodes)
    options = options_of(arguments, least, most)
    require_meeting_point(options)
    # Threads are shared out; torch's agent would set 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node)))
    # Restarted gloo processes find the old ones' keys in a store that outlives them, and cannot connect (torch 2.15).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with ExitStack() as stack:
        if most == 1:  # of several machines only rank 0's writes
            stack.enter_context(lock_for_ranks(job.dump_folder))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="titan-ranks-", ignore_cleanup_errors=True)))
        _quiet_torch()
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        from titan_core.train.agent import RankAgent
        from titan_core.train.outcome import FOLDER

        lifecycle = Lifecycle(module for module, _ in job.registry.modules())
        with rendezvous_errors(options):
            spec = WorkerSpec(
                role=ROLE,
                local_world_size=per_node,
                entrypoint=sys.executable,
                args=("-u", "-m", "titan_core", "train", arguments.recipe, *overrides),
                rdzv_handler=handler(options, str(uuid.uuid4())),
                max_restarts=arguments.max_restarts,
                monitor_interval=0.1,
                master_addr=options.master[0],
                master_port=options.master[1],
            )
            agent = RankAgent(
                spec, (least, most), folder, lambda began: lifecycle.diagnose(run=job.dump_folder, since=began)
            )
            # Torch's agent gives ranks the environment of this process.
            for name, value in {**environment_of_child(), FOLDER: str(agent.outcomes_folder)}.items():
                os.environ[name] = value
                stack.callback(os.environ.pop, name, None)
            return _run(agent, spec)


def _run(agent: RankAgent, spec: WorkerSpec) -> int:
    """Until the ranks have ended; the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from titan_core.train.agent import JobInterrupted
    from titan_core.train.outcome import interrupted_line

    closes = True
    try:
        agent.run(ROLE)
    except SignalException as error:
        closes = False  # other machines may continue without this one
        print(f"titan: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except JobInterrupted:
        if agent.failure is None:
            print("titan: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
    finally:
        if closes:
            try:
                spec.rdzv_handler.shutdown()
            except RendezvousError as error:
                log.warning("the rendezvous cannot be closed: %s", error)
    if agent.failure is not None:
        for line in agent.failure.lines:
            print(f"titan: {line}", file=sys.stderr)
        return agent.failure.status
    interrupted = next((one for one in agent.outcomes.values() if one.interrupted), None)
    if interrupted is not None:
        print(f"titan: {interrupted_line(interrupted, own_command())}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def own_command() -> str:
    """The command that started this process, as a shell takes it; without secrets."""
    return shlex.join(["titan", *arguments_without_secrets(sys.argv[1:])])


def _quiet_torch() -> None:
    """Torch's agent and stores write warnings and tracebacks of what is reported in a line here."""
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch.distributed  # noqa: F401 - reads the level

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # of this process alone, not of the ranks
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def _processes_per_node(text: str | None) -> int:
    if text is None:
        return 1
    if text == "gpu":
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise UserError.one("--nproc-per-node gpu", "torch sees no CUDA device", "give a number")
        return count
    return _number("--nproc-per-node", text, MOST_PROCESSES)


def _number(option: str, text: str, most: int) -> int:
    number = parse_whole(text, 1, most)
    if number is None:
        raise UserError.one(f"{option} {shorten(text)}", f"must be a whole number from 1 to {most}", "for example 2")
    return number
