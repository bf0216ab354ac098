"""The sum of a step's counts with real gloo, in its ring and over a tree, on few ranks that are threads of this process."""

from __future__ import annotations

import itertools
import os
import threading
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api.parallel import tree

ROUNDS = 50
SIZES = (4, 8, 16)
NUMBERS = 11
"""float64 numbers in a step's sum: flags, counts and weight."""


def _in_ring(numbers: Tensor, group: Any) -> None:
    group.allreduce([numbers]).wait()


def _over_tree(numbers: Tensor, group: Any) -> None:
    tree.reduce_over_tree(numbers, torch.add, group, tree.FIRST_SUM_TAG)


class _Threads:
    """Stands for ``torch.distributed``, which has one rank for each process."""

    get_rank = staticmethod(lambda group: group.rank())
    get_world_size = staticmethod(lambda group: group.size())
    is_initialized = staticmethod(lambda: True)
    send = staticmethod(lambda tensor, group, group_dst, tag: group.send([tensor], group_dst, tag).wait())
    isend = staticmethod(lambda tensor, group, group_dst, tag: group.send([tensor], group_dst, tag))
    recv = staticmethod(lambda tensor, group, group_src, tag: group.recv([tensor], group_src, tag).wait())


def all_reduces(ranks: int, rounds: int = ROUNDS, over_tree: bool = True) -> tuple[float, float]:
    """Return seconds per sum: elapsed, and CPU time of one rank."""
    add = _over_tree if over_tree else _in_ring
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not exported to type checkers
    start, end = threading.Barrier(ranks + 1), threading.Barrier(ranks + 1)
    wrong: list[float] = []

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        numbers = torch.ones(NUMBERS, dtype=torch.float64)
        add(numbers, group)
        start.wait()
        for _ in range(rounds):
            numbers.fill_(1)
            add(numbers, group)
        if numbers[0] != ranks:
            wrong.append(float(numbers[0]))
        end.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    with patch.object(tree, "dist", _Threads):
        for thread in threads:
            thread.start()
        start.wait()
        elapsed, cpu = time.perf_counter(), time.process_time()
        end.wait()
        elapsed, cpu = time.perf_counter() - elapsed, time.process_time() - cpu
        for thread in threads:
            thread.join()
    assert not wrong, wrong
    return elapsed / rounds, cpu / rounds / ranks


def report() -> tuple[float, float]:
    """Print what sums take on few ranks; return the CPU seconds of a hop around the ring and of a round of the tree."""
    each = [0.0, 0.0]
    for ranks, over_tree in itertools.product(SIZES, (False, True)):
        elapsed, cpu = all_reduces(ranks, over_tree=over_tree)
        steps = 2 * (ranks - 1).bit_length() if over_tree else 2 * (ranks - 1)
        each[over_tree] = cpu / steps
        name, step = ("tree", "round") if over_tree else ("ring", "hop")
        took = f"{elapsed * 1e3:.2f} ms, {cpu * 1e3:.3f} ms of CPU per rank, {each[over_tree] * 1e6:.0f} us per {step}"
        print(f"gloo, {name}: {ranks} ranks: {took}")
    return each[0], each[1]
