"""Counts the sockets of each rank of a job on GPUs, without GPUs: NCCL is replaced by torch's fake backend, gloo is real.

The ranks are forks of one process that has imported torch, and meet over the loopback device. As under torchrun, another
process has the store. (Titan's launcher leaves it to rank 0, which then has one more socket per rank.)

    uv run python benchmarks/sockets.py [--ranks 64] [--recipe llama3_debug] [--training.enable_cpu_offload true ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from unittest.mock import patch

import torch
import torch._dynamo  # device meshes use it: imported once, and not by each fork
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.loop import world as joining
from titan_core.plugins.registry import Components
from titan_core.toolkit.arguments import parse_overrides

FORK = multiprocessing.get_context("fork")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def sockets() -> int:
    """Return the number of this process's open sockets."""
    names = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.readlink(name).startswith("socket:") for name in names if os.path.islink(name))


def opened_by(rank: int, job: AssembledJob) -> int:
    """Join the other ranks as a rank on a GPU does; return the number of sockets that this has opened."""
    before = sockets()
    gpu = torch.device("cuda", 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0")
    with (
        patch.object(joining, "choose_device", return_value=gpu),
        patch.object(joining, "backend_for", return_value="cpu:gloo,cuda:fake"),
        patch.object(torch.cuda, "is_initialized", return_value=True),
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        patch.object(torch.accelerator, "device_count", return_value=1),
        patch.object(torch.accelerator, "is_available", return_value=True),
        patch.object(joining, "reset_compiler"),  # takes seconds, and the process ends
        patch.object(torch.cuda, "get_device_properties", side_effect=lambda device: argparse.Namespace(uuid=rank)),
        joining.join_world(job) as world,
    ):
        world.sum(torch.ones(1))
        opened = sockets() - before
        world.gather(opened)  # no rank leaves before all have counted
        return opened


def report(to: Connection, rank: int, job: AssembledJob) -> None:
    """Send :func:`opened_by` of ``rank``."""
    to.send(opened_by(rank, job))


def host_store(to: Connection) -> None:
    """Send the port of a store, which exists until this process is ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    to.send(store.port)
    signal.pause()


def start(work: Callable[..., None], *arguments: object) -> Connection:
    """Run ``work`` in a fork of this process; return where it sends its results."""
    here, there = FORK.Pipe(duplex=False)
    FORK.Process(target=work, args=(there, *arguments), daemon=True).start()
    there.close()
    return here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--recipe", default="llama3_debug")
    arguments, overrides = parser.parse_known_args()
    config, registry = load_config(arguments.recipe, parse_overrides(overrides), Components.from_installed())
    job = assemble(config, registry, arguments.ranks)
    print(f"{arguments.ranks} ranks: {job.mesh}")
    os.environ.update(LOOPBACK, WORLD_SIZE=str(arguments.ranks))
    os.environ["MASTER_PORT"] = str(start(host_store).recv())
    ranks = [start(report, rank, job) for rank in range(arguments.ranks)]
    opened = [rank.recv() for rank in ranks]
    print(f"at most {max(opened)} sockets per rank")


if __name__ == "__main__":
    main()
