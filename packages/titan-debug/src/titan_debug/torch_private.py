"""All private PyTorch API that this package uses. Checked with torch 2.11 to 2.15.

* ``torch.distributed.distributed_c10d._world``: the table of process groups. Public functions describe a group but do not
  list the groups.
* ``torch._C._distributed_c10d._dump_fr_trace`` and ``._dump_nccl_trace``: Flight Recorder's entries for gloo and NCCL.
  Builds without NCCL lack the second.
* ``torch.cuda.memory._record_memory_history`` and ``._dump_snapshot``: private by name, but the interface that PyTorch's
  documentation describes for memory snapshots.
* ``nn.Module._compiled_call_impl``: what ``nn.Module.compile`` sets. ``torch.compiler.set_stance`` would also stop the
  functions that modules have compiled.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, distributed_c10d


def process_groups() -> list[ProcessGroup]:
    """Return the process groups that this rank belongs to, in the order of their creation."""
    return list(distributed_c10d._world.pg_names)


def flight_recorder_entries() -> Iterator[dict[str, Any]]:
    """Yield the entries that Flight Recorder holds for this process, backend by backend.

    An entry may appear twice if both backends share a recorder. Torch's JSON form of the entries lacks the stacks, so this
    reads the pickle, which this process itself has just written.
    """
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            yield from pickle.loads(dump()).get("entries", ())


@contextmanager
def uncompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules without what ``nn.Module.compile`` has compiled, so that hooks see the modules inside them."""
    compiled = [(module, module._compiled_call_impl) for module in modules if module._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


class CudaMemoryHistory:
    """Torch's record of CUDA allocations."""

    def start(self, max_events: int) -> None:
        """Start recording allocations with their stacks.

        Args:
            max_events: number of allocations and frees to keep; the oldest are dropped.
        """
        torch.cuda.memory._record_memory_history(max_entries=max_events)

    def write(self, file: Path) -> None:
        """Write a pickled snapshot to ``file``: the current allocations and the recorded history."""
        torch.cuda.memory._dump_snapshot(str(file))

    def stop(self) -> None:
        """Stop recording."""
        torch.cuda.memory._record_memory_history(enabled=None)
