"""What a rank records, and what it dumps: torch's record of its collectives, its process groups and its threads."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup

from titan_core.api import Job, World
from titan_debug import torch_private
from titan_debug.flight.dump import Dump, Entry, Frame, Group, Thread
from titan_debug.flight.stacks import thread_stacks

log = logging.getLogger(__name__)

STEPS = 4
"""Number of steps whose collectives are kept: enough to see what a step that hangs does differently from those before."""
LEAST, MOST = 2_000, 50_000  # an entry takes 1 to 2 KB, most of it its stack
_PER_BLOCK_OF_DATA_PARALLELISM = 3  # gather the parameters forward and backward, reduce their gradients
_PER_BLOCK_OF_A_DIVISION = 12  # divided weights, sequences or experts: 4 forward, 4 backward, 4 recomputed
_PER_STAGE = 4  # receive and send, forward and backward
_PER_STEP = 20

_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def capacity(job: Job) -> int:
    """Return the number of collectives of a rank in :data:`STEPS` steps, within bounds."""
    return min(max(LEAST, STEPS * collectives_per_step(job)), MOST)


def collectives_per_step(job: Job) -> int:
    """Return an estimate of the number of collectives, sends and receives of a rank in a step, rather too high than too
    low."""
    mesh, batch = job.mesh, job.batch
    active = [dim for dim in mesh.dims if mesh.degrees[dim.name] > 1]
    stages = math.prod(mesh.degrees[dim.name] for dim in active if dim.divides == "layers")
    divisions = sum(dim.divides in ("weights", "sequence") for dim in active) + sum(
        degree > 1 for degree in mesh.view_degrees.values()
    )
    per_block = _PER_BLOCK_OF_A_DIVISION * divisions
    if mesh.data_degree > 1:
        per_block += _PER_BLOCK_OF_DATA_PARALLELISM
    # A pipeline may divide a batch into its sequences.
    passes = batch.microbatches * (batch.local_size if stages > 1 else 1)
    per_pass = per_block * (job.model.layout.num_blocks / stages + 2) + (_PER_STAGE if stages > 1 else 0)
    return math.ceil(_PER_STEP + passes * per_pass)


def prepare_environment(size: int, folder: Path) -> None:
    """Set the number of collectives that torch records, and the path to which NCCL's own watchdog writes the file that
    ``torchfrtrace`` reads. Variables that the user has set stay. Torch reads them when a process starts its first
    collective."""
    if not any(name in os.environ for name in _SIZE):
        os.environ[_SIZE[0]] = str(size)
    if not any(name in os.environ for name in _FILE):
        os.environ[_FILE[0]] = str(folder.absolute() / "torch-rank-")


def collect(world: World, why: str, attempt: float, since: float, step: int, in_step: bool, lost: bool) -> Dump:
    """Return what this rank is doing now. If torch's records cannot be read, the dump contains the stacks alone.

    Args:
        why: reason for the dump.
        attempt: start of the attempt, in seconds since the epoch on rank 0's clock.
        since: seconds since the epoch. Earlier collectives belong to a previous job of this process and are omitted.
        step: the last step that the rank started.
        in_step: whether that step is still running.
        lost: whether an exception reports that another rank is gone or late.
    """
    stacks: dict[tuple[Frame, ...], int] = {}
    groups: list[Group] = []
    entries: list[Entry] = []
    recorded = True
    try:
        groups, entries = process_groups(world), recorded_entries(stacks, since)
    except Exception:  # another torch version may change this private API, and the stacks are useful on their own
        log.exception("cannot read torch's record of collectives; the dump contains stacks only")
        recorded = False
    threads = [Thread(name, main, stacks.setdefault(tuple(stack), len(stacks))) for name, main, stack in thread_stacks()]
    return Dump(
        rank=world.rank,
        world_size=world.size,
        attempt=attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.time(),
        why=why,
        step=step,
        in_step=in_step,
        coordinates={dim: world.coordinate(dim) for dim in world.mesh.names},
        groups=groups,
        entries=entries,
        threads=threads,
        stacks=[list(stack) for stack in stacks],
        lost=lost,
        recorded=recorded,
    )


def process_groups(world: World) -> list[Group]:
    """Return the process groups that this rank belongs to, each labelled with its purpose."""
    dims_of: dict[str, list[str]] = {}
    for dim in world.mesh.names:
        dims_of.setdefault(world.mesh[dim].get_group().group_name, []).append(dim)
    return [
        Group(
            group.group_name,
            _label(group, dims_of.get(group.group_name, [])),
            tuple(torch.distributed.get_process_group_ranks(group)),
        )
        for group in torch_private.process_groups()
    ]


def _label(group: ProcessGroup, dims: list[str]) -> str:
    if group.group_desc == "default_pg":
        return f"all ranks ({', '.join(dims)})" if dims else "all ranks"
    if dims:
        return ", ".join(dims)
    if group.group_desc in ("", "undefined"):
        return f"group {group.group_name}"
    return group.group_desc.removeprefix("mesh_")


def recorded_entries(stacks: dict[tuple[Frame, ...], int], since: float) -> list[Entry]:
    """Return all recorded collectives in the order in which they started. Adds their stacks to ``stacks``, which maps each
    stack to its index.

    Args:
        since: seconds since the epoch. Earlier collectives belong to a previous job of this process and are dropped.
    """
    found: dict[tuple[Any, ...], Entry] = {}
    for fields in torch_private.flight_recorder_entries():
        if fields["time_created_ns"] < since * 1e9:
            continue
        key = (fields["profiling_name"], fields["process_group"], fields["record_id"], fields["time_created_ns"])
        frames = tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in fields.get("frames", ()))
        found[key] = _entry(fields, stacks.setdefault(frames, len(stacks)))
    return sorted(found.values(), key=lambda entry: entry.created)


def _entry(fields: Mapping[str, Any], stack: int) -> Entry:
    backend, _, op = fields["profiling_name"].rpartition(":")
    p2p = bool(fields["is_p2p"])
    timeout = fields.get("timeout_ms")
    return Entry(
        group=fields["process_group"][0],
        backend=backend,
        op=op,
        seq=fields["p2p_seq_id" if p2p else "collective_seq_id"],
        p2p=p2p,
        # gloo never reports "completed"; it retires an operation that is over.
        done=bool(fields.get("retired")) or fields["state"] == "completed",
        state=fields["state"],
        created=fields["time_created_ns"] / 1e9,
        input_sizes=[list(size) for size in fields["input_sizes"]],
        input_dtypes=list(fields["input_dtypes"]),
        output_sizes=[list(size) for size in fields["output_sizes"]],
        output_dtypes=list(fields["output_dtypes"]),
        timeout=timeout / 1000 if timeout else None,
        stack=stack,
    )
