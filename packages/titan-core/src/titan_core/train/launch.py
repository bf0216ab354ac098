"""Starting the processes of a job, by torchrun's own Python API. Imports torch only once a job is launched."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from titan_core.cli.arguments import parse_whole
from titan_core.config.numbers import MOST_PROCESSES
from titan_core.config.problems import shorten
from titan_core.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def processes(nproc_per_node: str | None, nnodes: str) -> int | None:
    """World size, or ``None`` where the number of machines is a range.

    Raises:
        UserError: not a number.
    """
    per_node = _processes_per_node(nproc_per_node)
    if ":" in nnodes:
        for part in nnodes.split(":", 1):
            _number("--nnodes", part)
        return None
    return per_node * _number("--nnodes", nnodes)


def launch(arguments: argparse.Namespace) -> int:
    """Run ``titan train`` with the same recipe and overrides in every process; returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    per_node = _processes_per_node(arguments.nproc_per_node)
    # Threads are shared out; torchrun would set 1 and say so.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node)))
    # Restarted gloo processes find the old ones' keys in a store that outlives them, and cannot connect (torch 2.15).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = ["--nproc-per-node", str(per_node), "--max-restarts", str(arguments.max_restarts)]
    if arguments.nnodes == "1":
        options += ["--standalone"]
    else:
        options += ["--nnodes", arguments.nnodes, "--rdzv-id", arguments.rdzv_id]
        options += ["--rdzv-backend", arguments.rdzv_backend, "--node-rank", arguments.node_rank]
        if arguments.rdzv_endpoint is None:
            raise UserError.one(
                "--nnodes", "several machines need a place to meet", "give --rdzv-endpoint HOST:PORT, the same on each"
            )
        options += ["--rdzv-endpoint", arguments.rdzv_endpoint]
    # Its account of failed processes goes into one line of ours, below.
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    try:
        torchrun([*options, "-m", "titan_core", "train", arguments.recipe, *arguments.override_arguments])
    except SignalException as error:
        print(f"titan: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = _first_failure(error.failures)
        # A worker that exits by itself has said why; one that was killed cannot.
        if failure.exitcode < 0:
            print(f"titan: error: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
            return 128 - failure.exitcode
        print(f"titan: rank {rank} ended with status {failure.exitcode}", file=sys.stderr)
        return int(failure.exitcode)
    return 0


def _first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first; those that the launcher then ended by SIGTERM only where there is no other."""
    return min(failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp))


def _processes_per_node(text: str | None) -> int:
    if text is None:
        return 1
    if text == "gpu":
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise UserError.one("--nproc-per-node gpu", "torch sees no CUDA device", "give a number")
        return count
    return _number("--nproc-per-node", text)


def _number(option: str, text: str) -> int:
    number = parse_whole(text, 1, MOST_PROCESSES)
    if number is None:
        raise UserError.one(
            f"{option} {shorten(text)}", f"must be a whole number from 1 to {MOST_PROCESSES}", "for example 2"
        )
    return number
