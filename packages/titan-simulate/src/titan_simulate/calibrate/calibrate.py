"""Measures a machine: its devices while all ranks compute, then the links between them."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from titan_core.api import UserError
from titan_core.toolkit.device import choose_device, device_name
from titan_core.toolkit.status import phase
from titan_simulate.calibrate.collectives import measure_links
from titan_simulate.calibrate.compute import measure_compute, memory_of
from titan_simulate.calibrate.ranks import groups_of_nodes, in_ranks, joined
from titan_simulate.calibrate.result import Calibration, CollectivePoint, Compute
from titan_simulate.calibrate.timing import CudaTimer, HostTimer, Timer


def calibrate(choice: str, ranks: int | None) -> Calibration | None:
    """Return the figures of this machine; ``None`` on ranks other than 0.

    If a launcher has started this process, its ranks measure together. Otherwise this function starts ``ranks`` processes.

    Args:
        choice: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        ranks: processes on this machine (default: one per GPU, or one on a CPU).

    Raises:
        UserError: there is no such device, too few of them, or a clock shows no plausible time.
    """
    if "RANK" in os.environ:
        if ranks is not None:
            raise UserError.one("--nproc-per-node", "a launcher has already started the ranks", "leave it out")
        with joined(choice) as device, phase("measuring"):
            return _measure(device)
    count = torch.cuda.device_count() if choice != "cpu" else 0
    if choice == "cuda" and not torch.cuda.is_available():
        raise UserError.one("--device cuda", "torch finds no CUDA device", "use --device cpu")
    if count and ranks is not None and ranks > count:
        raise UserError.one(
            f"--nproc-per-node {ranks}", f"this machine has {count} CUDA devices", f"use at most {count}, or --device cpu"
        )
    ranks = ranks or max(1, count)
    threads = torch.get_num_threads() if ranks == 1 else _threads(ranks)
    if ranks > 1:
        with phase(f"measuring with {ranks} processes"):
            return in_ranks(ranks, threads, _measure_as_rank, choice)
    with phase("measuring the device"):
        device = choose_device(choice)
        found = _facts(device, 1, 1, measure_compute(device, *_timers(device)))
    if device.type == "cuda":
        return found
    with phase("measuring messages between 2 processes"):
        return replace(found, node=tuple(in_ranks(2, _threads(2), _links_as_rank, choice)))


def _threads(ranks: int) -> int:
    """Return the threads of each of ``ranks`` processes, as launchers set them."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else max(1, (os.cpu_count() or 1) // ranks)


def _measure_as_rank(choice: str) -> Calibration | None:
    with joined(choice) as device:
        return _measure(device)


def _links_as_rank(choice: str) -> list[CollectivePoint]:
    with joined(choice) as device:
        group = groups_of_nodes()[0]
        assert group is not None
        return measure_links(group, device)


def _measure(device: torch.device) -> Calibration | None:
    """Measure on every rank together, because ranks of a node share memory, power and cards."""
    dist.barrier()
    mine = measure_compute(device, *_timers(device))
    all_of_them: list[Compute | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    node, across, per_node = groups_of_nodes()
    compute = median_of([one for one in all_of_them if one is not None])
    within = measure_links(node, device) if node is not None else []
    between = measure_links(across, device) if across is not None else []
    if dist.get_rank() != 0:
        return None
    found = _facts(device, dist.get_world_size(), per_node, compute)
    return replace(found, node=tuple(within), network=tuple(between))


def median_of(ranks: Sequence[Compute]) -> Compute:
    """Return the figures of the rank whose large matmuls are of median speed: a slow device is seen in the spread of a
    collective, and a figure of one rank fits its other figures."""
    kind = next(iter(ranks[0].matmuls))
    speeds = [sum(point.tflops for point in rank.matmuls[kind]) for rank in ranks]
    return ranks[speeds.index(statistics.median_low(speeds))]


def _timers(device: torch.device) -> tuple[Timer, HostTimer]:
    # The time of a single thread's processor leaves out what other processes used.
    host = HostTimer(time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    return (CudaTimer(device), host) if device.type == "cuda" else (host, host)


def _facts(device: torch.device, ranks: int, per_node: int, compute: Compute) -> Calibration:
    host: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "ranks": ranks,
        "ranks_per_node": per_node,
        "compute": compute,
    }
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    memory = memory_of(device)
    if device.type == "cpu":
        name = f"{_processor()}, {device_name(device)}"
        return Calibration(name, True, memory, multiprocessors=1, capability=None, versions=versions, **host)
    properties = torch.cuda.get_device_properties(device)
    return Calibration(
        device_name(device),
        False,
        memory,
        multiprocessors=properties.multi_processor_count,
        capability=f"{properties.major}.{properties.minor}",
        versions={**versions, "CUDA": str(torch.version.cuda)},
        **host,
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        found = []
    return found[0] if found else platform.machine()
