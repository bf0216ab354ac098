"""The collectives that torch's Flight Recorder has recorded in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup

from titan_core.api import World
from titan_debug import torch_private
from titan_debug.flight.dump import Entry, Frame, Group

_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def prepare_environment(size: int, folder: Path) -> None:
    """Set the number of collectives that torch records, and the path to which NCCL's own watchdog writes the file that
    ``torchfrtrace`` reads. Variables that the user has set stay. Torch reads them when a process starts its first
    collective."""
    if not any(name in os.environ for name in _SIZE):
        os.environ[_SIZE[0]] = str(size)
    if not any(name in os.environ for name in _FILE):
        os.environ[_FILE[0]] = str(folder.absolute() / "torch-rank-")


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
