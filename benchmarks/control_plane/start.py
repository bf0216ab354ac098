"""What rank 0 takes to start: a real gloo group of all ranks, of which no other exists, and the mesh of a job."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from titan_core.api import JobMesh, MeshPlan
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.torch_private import one_worker_per_gloo_group
from titan_simulate.engine.world import fake_process_group

TENSOR_PARALLEL = 8


def _gloo(ranks: int) -> Any:
    os.environ |= {"TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo"}  # as a job has it
    with one_worker_per_gloo_group():
        return dist.ProcessGroupGloo(dist.HashStore(), 0, ranks, timedelta(seconds=60))  # type: ignore[attr-defined]


def _mesh(ranks: int) -> Any:
    plan = MeshPlan(STANDARD_DIMS, {dim.name: 1 for dim in STANDARD_DIMS} | {"dp_shard": ranks // 8, "tp": TENSOR_PARALLEL})
    with fake_process_group(0, ranks):
        return JobMesh(plan, "cpu")


def _measured(to: Connection, make: Callable[[int], Any], ranks: int) -> None:
    torch.set_num_threads(1)
    make(TENSOR_PARALLEL * 2)  # imports and caches
    before, began = _memory(), time.process_time()
    made = make(ranks)
    to.send((time.process_time() - began, _memory() - before))
    del made


def _memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def report(ranks: int) -> None:
    """Print the CPU seconds and the memory of both, each in a process of its own."""
    for name, make in (("a gloo group of all ranks", _gloo), (f"the mesh of FSDP x TP {TENSOR_PARALLEL}", _mesh)):
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe()
        process = fork.Process(target=_measured, args=(there, make, ranks))
        process.start()
        there.close()
        seconds, memory = here.recv()
        process.join()
        print(f"start: {ranks} ranks: {name}: {seconds:.3f} s of CPU, {memory / 2**20:.0f} MiB", flush=True)
