"""Ranks that measure together: those of a launcher, or processes that this one starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not exported to type checkers

from titan_core.api import UserError
from titan_core.toolkit.device import backend_for, choose_device
from titan_core.toolkit.worker_process import end_now, worker_processes

R = TypeVar("R")

TIMEOUT = timedelta(minutes=5)


def in_ranks(ranks: int, threads: int, function: Callable[..., R], *arguments: object) -> R:
    """Return the result of ``function`` on rank 0, called by ``ranks`` new processes of this machine.

    Args:
        threads: threads of each process.
        function: a module-level function.

    Raises:
        UserError: a rank raised it.
        RuntimeError: a process has died.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool: ProcessPoolExecutor = worker_processes(ranks)
    try:
        calls = [pool.submit(_as_rank, rank, ranks, store.port, threads, function, arguments) for rank in range(ranks)]
        results = [call.result() for call in calls]
    finally:
        end_now(pool)
    return results[0]


def _as_rank(rank: int, ranks: int, port: int, threads: int, function: Callable[..., R], arguments: tuple[object, ...]) -> R:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.set_num_threads(threads)
    return function(*arguments)


@contextmanager
def joined(choice: str) -> Iterator[torch.device]:
    """Join the ranks that torchrun's environment describes; yield this rank's device.

    Raises:
        UserError: there is no such device.
    """
    device = choose_device(choice)
    dist.init_process_group(backend_for(device), timeout=TIMEOUT, device_id=device if device.type == "cuda" else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def groups_of_nodes() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, int]:
    """Return the group of this rank's node, the group of the ranks that have its place on each node, and the number of ranks
    of a node. A group of one rank is ``None``. All ranks call this together.

    Raises:
        UserError: nodes have different numbers of ranks.
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, f"{socket.gethostname()} {_boot_id()}")
    nodes = [[rank for rank, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    sizes = {len(node) for node in nodes}
    if len(sizes) > 1:
        shown = ", ".join(str(size) for size in sorted(sizes))
        raise UserError.one(
            "titan calibrate", f"the nodes have {shown} ranks", "start the same number of ranks on each node"
        )
    (size,) = sizes
    node = _group(nodes) if size > 1 else None
    across = _group([list(place) for place in zip(*nodes, strict=True)]) if len(nodes) > 1 else None
    return node, across, size


def _group(groups: list[list[int]]) -> dist.ProcessGroup:
    made, _ = dist.new_subgroups_by_enumeration(groups)
    assert isinstance(made, dist.ProcessGroup)  # every rank is in a group
    return made


def _boot_id() -> str:
    """Return what differs between machines of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
