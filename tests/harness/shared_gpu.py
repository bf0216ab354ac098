"""Several ranks on one GPU. NCCL refuses two ranks on a device, so their groups use gloo, which copies CUDA tensors through
host memory. All code but the transport is that of a job with a GPU per rank.

gloo supports only some collectives for CUDA tensors, and no sends; these go through host memory here. :func:`lacking` tells
which collectives it lacks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from harness.on_device import SMALL, in_host_memory
from titan_testing.jobs import RunRecord, run_recipe


@contextmanager
def sharing_a_device(stage_all: bool = False) -> Iterator[None]:
    """Within, this process is local rank 0, which selects the first GPU, and every group that would use NCCL uses gloo.

    Args:
        stage_all: send CPU tensors through copies too, to check this code without a GPU.
    """
    make_group = distributed_c10d._new_process_group_helper
    send, receive = dist.ProcessGroup.send, dist.ProcessGroup.recv
    # What the class holds: pybind11's functions, once read from the class, would not bind to instances any more.
    held = vars(dist.ProcessGroup)["send"], vars(dist.ProcessGroup)["recv"]
    parameters = inspect.signature(make_group)

    def make_gloo_group(*arguments: Any, **keywords: Any) -> Any:
        bound = parameters.bind(*arguments, **keywords)
        bound.arguments["backend"] = dist.Backend(str(bound.arguments["backend"]).replace("nccl", "gloo"))
        bound.arguments |= {"device_id": None, "backend_options": None}
        return make_group(*bound.args, **bound.kwargs)

    def staged_send(group: dist.ProcessGroup, tensors: list[Tensor], *others: Any) -> Any:
        if not (stage_all or tensors[0].is_cuda):
            return send(group, tensors, *others)
        host = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        return _Staged(send(group, host, *others), host, lambda: None)

    def staged_receive(group: dist.ProcessGroup, tensors: list[Tensor], *others: Any) -> Any:
        if not (stage_all or tensors[0].is_cuda):
            return receive(group, tensors, *others)
        host = [torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format) for tensor in tensors]

        def deliver() -> None:
            with torch.no_grad():
                for tensor, arrived in zip(tensors, host, strict=True):
                    tensor.copy_(arrived)

        return _Staged(receive(group, host, *others), host, deliver)

    local_rank, os.environ["LOCAL_RANK"] = os.environ.get("LOCAL_RANK"), "0"
    distributed_c10d._new_process_group_helper = make_gloo_group
    dist.ProcessGroup.send, dist.ProcessGroup.recv = staged_send, staged_receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        distributed_c10d._new_process_group_helper = make_group
        dist.ProcessGroup.send, dist.ProcessGroup.recv = held  # type: ignore[method-assign]
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


class _Staged:
    """A send or a receive through host memory: the work of torch, and what to do when it is complete."""

    def __init__(self, work: Any, host: list[Tensor], deliver: Callable[[], None]) -> None:
        self._work, self._host, self._deliver = work, host, deliver

    def wait(self, *arguments: Any) -> bool:
        done: bool = self._work.wait(*arguments)
        self._deliver()
        self._deliver = lambda: None
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _all_to_all(tensor: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(tensor), tensor)


def _all_gather(tensor: Tensor) -> None:
    dist.all_gather_into_tensor(torch.empty(2 * len(tensor), device=tensor.device), tensor)


def _reduce_scatter(tensor: Tensor) -> None:
    dist.reduce_scatter_tensor(torch.empty(len(tensor) // 2, device=tensor.device), tensor)


COLLECTIVES: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, src=0),
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}


def lacking(device_type: str) -> dict[str, str]:
    """Return the collectives that gloo lacks for tensors of a device, each with torch's message. Runs on two ranks."""
    found: dict[str, str] = {}
    with sharing_a_device():
        device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
        dist.init_process_group("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")
        try:
            for name, call in COLLECTIVES.items():
                try:
                    call(torch.ones(8, device=device))
                except (RuntimeError, ValueError, NotImplementedError) as error:  # raised before anything is sent
                    found[name] = str(error).strip().partition("\n")[0]
        finally:
            dist.destroy_process_group()
    return found


def train_sharing(folder: str, device_type: str, overrides: dict[str, object]) -> RunRecord:
    """Train ``tiny`` as one of the ranks that share a device; return its record, with all tensors in host memory."""
    os.chdir(folder)
    with sharing_a_device(stage_all=device_type == "cpu"):
        settings = {**SMALL, **overrides, "job.device": device_type}
        return in_host_memory(run_recipe("tiny", settings, weights=True))
