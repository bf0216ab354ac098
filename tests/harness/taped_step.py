"""A stand-in for CUDA graphs on the CPU: repeats the operators of a step, with the tensors that they had when it was
recorded.

As a graph does, it does not run Python again, reads and writes the recorded tensors only, and computes nothing while it
records. What a step takes from anywhere else, such as a number of the host, is that of the recording ever after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from titan_core.api import ModelPart, StepRunner
from titan_parallel import cuda_graphs

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
"""Operators for which the host waits."""


class Tape(TorchDispatchMode):
    """Records operators below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in self._made | self._before.keys():
                        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                        self._before[storage.data_ptr()] = whole, whole.clone()
        result = func(*args, **keywords)
        if func.namespace == "profiler":
            return result
        self.calls.append((func, args, keywords, result))
        if all(returned.alias_info is None for returned in func._schema.returns):
            self._made |= {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def undo(self) -> None:
        """Restore what recording has written to tensors from outside."""
        for now, before in self._before.values():
            now.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operators again."""
        for func, args, keywords, result in self.calls:
            returns = func._schema.returns
            if returns and all(one.alias_info is not None and not one.alias_info.is_write for one in returns):
                continue  # a view, which is there
            again = func(*args, **keywords)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(new, torch.ScriptObject):
                    new.wait()  # a collective in place
                elif isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(wait_tensor(new) if func.namespace == "_c10d_functional" else new)


def record(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """See :func:`titan_parallel.cuda_graphs.record`."""
    resize, wait = torch.UntypedStorage.resize_, dist.Work.wait

    def kept(storage: torch.UntypedStorage, size: int) -> Any:
        """FSDP frees what it has gathered. The memory of a graph stays."""
        return resize(storage, size) if size else storage

    def waited(work: dist.Work, *timeout: Any) -> bool:
        """gloo copies the result when it is waited for, from memory that only this collective has."""
        with _disable_current_modes():
            return wait(work, *timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", kept)
        patch.setattr(dist.Work, "wait", waited)
        with Tape() as tape:
            loss = step()
    tape.undo()
    return loss, tape.replay


def graphed(runner: StepRunner, parts: Sequence[ModelPart], context: object) -> StepRunner:
    """Return what :func:`titan_parallel.cuda_graphs.make_step` returns on a GPU."""
    return cuda_graphs.GraphedStep(runner, parts)


@contextmanager
def taped_graphs() -> Iterator[None]:
    """Within the ``with`` block, jobs with CUDA graphs repeat a tape."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "make_step", graphed)
        patch.setattr(cuda_graphs, "record", record)
        yield
