"""Binds a rank to the processor cores of the NUMA node that its GPU is on. Memory of other nodes is slower, for these cores
and for copies to the GPU.

Each rank binds itself, whatever started it. torch's launcher would use CUDA in its own process to find the GPU's node, and
needs the program ``numactl`` (torch 2.15).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from titan_core.api import UserError
from titan_core.api.config.sections import JobSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.device import choose_device
from titan_launch.config import NUMA_BINDING, NUMA_BINDINGS

log = logging.getLogger(__name__)

AUTO, NODE, OFF = NUMA_BINDINGS


def bind(job: AssembledJob, environment: Mapping[str, str], system: Path = Path("/sys")) -> None:
    """Bind this process, its threads and its future children to the cores of one NUMA node.

    By default only ranks on GPUs are bound, and only if the rank may use all cores of the node; otherwise something else has
    bound it. If ``node`` is requested, ranks on the CPU are divided among the nodes.

    Args:
        system: where sysfs is mounted.

    Raises:
        UserError: the requested binding does not exist.
    """
    requested = environment.get(NUMA_BINDING, AUTO)
    if requested not in NUMA_BINDINGS:
        where = f"environment: {NUMA_BINDING} = {requested!r}"
        raise UserError.one(where, "no such binding", f"use one of {', '.join(NUMA_BINDINGS)}")
    if requested == OFF or not hasattr(os, "sched_setaffinity"):  # macOS has no affinity
        return
    device = choose_device(job.config.section(JobSection).device)
    nodes = sorted(int(folder.name.removeprefix("node")) for folder in (system / "devices/system/node").glob("node[0-9]*"))
    if device.type == "cuda":
        node, near = _node_of(device, system), f", near {device}"
    elif requested == NODE and nodes:
        local_rank, ranks = int(environment["LOCAL_RANK"]), int(environment.get("LOCAL_WORLD_SIZE", "1"))
        node, near = nodes[local_rank * len(nodes) // ranks], ""
    else:
        return
    if node is None or node not in nodes or (requested == AUTO and len(nodes) == 1):
        return
    cores = _cores(system / f"devices/system/node/node{node}/cpulist")
    allowed = os.sched_getaffinity(0)
    if not cores & allowed or (requested == AUTO and not cores <= allowed):
        log.info("not bound to NUMA node %d%s: something else has bound this rank to other cores", node, near)
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores & allowed)
    log.info("bound to the %d cores of NUMA node %d%s", len(cores & allowed), node, near)


def _node_of(device: torch.device, system: Path) -> int | None:
    """Return the NUMA node of a GPU; ``None`` if the system does not know it."""
    found: Any = torch.cuda.get_device_properties(device)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
    except FileNotFoundError:
        return None
    return node if node >= 0 else None


def _cores(file: Path) -> set[int]:
    """Return the cores in a list such as ``0-3,8-11``."""
    cores: set[int] = set()
    for part in filter(None, file.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
