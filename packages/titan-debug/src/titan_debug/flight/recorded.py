"""What torch's Flight Recorder has kept of this process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from titan_core.api.world import World
from titan_debug.flight.dump import Entry, Frame, Group

_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def prepare_environment(size: int, folder: Path) -> None:
    """How many collectives torch is to keep, and where NCCL's own watchdog writes the file that ``torchfrtrace`` reads.
    Torch looks when a process begins its first collective. What the user has set stays."""
    if not any(name in os.environ for name in _SIZE):
        os.environ[_SIZE[0]] = str(size)
    if not any(name in os.environ for name in _FILE):
        os.environ[_FILE[0]] = str(folder.absolute() / "torch-rank-")


def process_groups(world: World) -> list[Group]:
    """The process groups that this rank is in. Their table is private; it is the same in torch 2.11 to 2.15."""
    groups = distributed_c10d._world
    by_name: dict[str, list[str]] = {}
    for dim in world.mesh.names:
        by_name.setdefault(world.mesh[dim].get_group().group_name, []).append(dim)
    return [
        Group(name, _label(group, name, by_name.get(name, [])), tuple(sorted(ranks, key=ranks.__getitem__)))
        for group, name in groups.pg_names.items()
        for ranks in (groups.pg_group_ranks[group],)
    ]


def _label(group: Any, name: str, dims: list[str]) -> str:
    if group.group_desc == "default_pg":
        return f"all ranks ({', '.join(dims)})" if dims else "all ranks"
    if dims:
        return ", ".join(dims)
    return f"group {name}" if group.group_desc in ("", "undefined") else group.group_desc.removeprefix("mesh_")


def recorded_entries(stacks: dict[tuple[Frame, ...], int], since: float) -> list[Entry]:
    """All collectives that are kept, in order; their stacks are put into ``stacks``, each with its index.

    Args:
        since: in seconds since the epoch. What was begun before is of an earlier job of this process.

    Torch's functions for it are private: ``_dump_fr_trace`` is gloo's recorder and ``_dump_nccl_trace`` NCCL's, in torch
    2.11 and 2.15. Their other form, JSON, leaves the stacks out; this one is a pickle of this process's own making.
    """
    traces = [getattr(_distributed_c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    found: dict[tuple[Any, ...], Entry] = {}
    for trace in traces:
        for one in pickle.loads(trace()).get("entries", ()) if trace is not None else ():
            if one["time_created_ns"] < since * 1e9:
                continue
            key = (one["profiling_name"], one["process_group"], one["record_id"], one["time_created_ns"])
            frames = tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in one.get("frames", ()))
            found[key] = _entry(one, stacks.setdefault(frames, len(stacks)))
    return sorted(found.values(), key=lambda entry: entry.created)


def _entry(one: Mapping[str, Any], stack: int) -> Entry:
    backend, _, op = one["profiling_name"].rpartition(":")
    p2p = bool(one["is_p2p"])
    timeout = one.get("timeout_ms")
    return Entry(
        group=one["process_group"][0],
        backend=backend,
        op=op,
        seq=one["p2p_seq_id" if p2p else "collective_seq_id"],
        p2p=p2p,
        # gloo never says "completed", but lets go of what is over.
        done=bool(one.get("retired")) or one["state"] == "completed",
        state=one["state"],
        created=one["time_created_ns"] / 1e9,
        input_sizes=[list(size) for size in one["input_sizes"]],
        input_dtypes=list(one["input_dtypes"]),
        output_sizes=[list(size) for size in one["output_sizes"]],
        output_dtypes=list(one["output_dtypes"]),
        timeout=timeout / 1000 if timeout else None,
        stack=stack,
    )
