"""The all-reduce of a step's counts with real gloo, on few ranks that are threads of this process."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ROUNDS = 50
SIZES = (4, 8, 16)
NUMBERS = 11
"""float64 numbers in a step's sum: flags, counts and weight."""


def all_reduces(ranks: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """Return seconds per all-reduce: elapsed, and CPU time of one rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not exported to type checkers
    start, end = threading.Barrier(ranks + 1), threading.Barrier(ranks + 1)
    wrong: list[float] = []

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        numbers = torch.ones(NUMBERS, dtype=torch.float64)
        group.allreduce([numbers]).wait()
        start.wait()
        for _ in range(rounds):
            numbers.fill_(1)
            group.allreduce([numbers]).wait()
        if numbers[0] != ranks:
            wrong.append(float(numbers[0]))
        end.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
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


def report() -> float:
    """Print what all-reduces take on few ranks; return the CPU seconds of a hop."""
    hop = 0.0
    for ranks in SIZES:
        elapsed, cpu = all_reduces(ranks)
        hop = cpu / (2 * (ranks - 1))
        print(f"gloo: {ranks} ranks: {elapsed * 1e3:.2f} ms, {cpu * 1e3:.3f} ms of CPU per rank, {hop * 1e6:.0f} us per hop")
    return hop
