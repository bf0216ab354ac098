"""All private PyTorch API that this package uses. Checked with torch 2.11 to 2.15.

* ``torch._subclasses.fake_tensor``: tensors with a device and a shape but no values. torch has no public way to make them.
* ``torch.utils._python_dispatch``: dispatch modes, which see every operator.
* ``torch._C._set_only_lift_cpu_tensors``: makes ``torch.tensor(..., device="cuda")`` show its copy to the device to modes.
* ``torch._C.DispatchKey``: to ask whether an operator is composite.
* ``torch._guards.active_fake_mode``: whether torch's own code runs in a fake mode, as DTensor does to find shapes.
* ``TorchDispatchMode._should_skip_dynamo``: torch wraps a mode's method to keep the compiler out. Nothing is compiled here.
* ``_prepare_schedule_with_comms`` of pipeline schedules: orders the communication between stages, which takes seconds and
  is not needed for the order of the computation.
* ``torch.cuda._is_in_bad_fork``: whether this process is a fork of one that had initialised CUDA. With a real driver it
  could not use the device.
* ``distributed_c10d._resolve_process_group``: a group by the name that functional collectives give it.

Operators are known by the names that a mode sees, among them ``aten::_to_copy``, ``aten::_pin_memory`` and those of
``_c10d_functional``; whether values decide about a result, by their tags, which are public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

ORDER_COMMUNICATION: Final = "_prepare_schedule_with_comms"
"""The method with which a schedule of several stages per rank orders its communication."""
DEVICE_OF: Final = torch.ops.prim.device.default
"""What C++ calls to find the device of a fake tensor."""


class DispatchMode(TorchDispatchMode):
    """A dispatch mode in a process that compiles nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_device(tensor: Tensor) -> torch.device:
    """Return the device that ``tensor`` is or pretends to be on, without consulting a mode."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def device_of(tensor: FakeTensor) -> torch.device:
    """Answer :data:`DEVICE_OF`: kernels that compute shapes see the meta device."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


@contextmanager
def lists_from(read: Callable[[Tensor], list[Any]]) -> Iterator[None]:
    """Within the ``with`` block, ``FakeTensor.tolist`` returns what ``read`` does: torch reads value by value, where a real
    tensor is copied at once."""
    original = FakeTensor.tolist
    setattr(FakeTensor, "tolist", lambda tensor: read(tensor))  # noqa: B010 (mypy: a method)
    try:
        yield
    finally:
        setattr(FakeTensor, "tolist", original)  # noqa: B010


def is_composite(operator: Any) -> bool:
    """Whether ``operator`` may be decomposed into others before or after it reaches a mode."""
    return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def only_lift_cpu_tensors(on: bool) -> None:
    """Set whether ``torch.tensor`` makes tensors on the CPU and then copies them, visibly."""
    torch._C._set_only_lift_cpu_tensors(on)


def let_forks_use_the_device() -> None:
    """Let forks of this process use CUDA although this process has initialised it: the stub driver keeps nothing that a fork
    would lack."""
    torch.cuda._is_in_bad_fork = lambda: False


def in_foreign_fake_mode() -> bool:
    """Whether torch's own code computes shapes in a fake mode of its own."""
    return active_fake_mode() is not None


def process_group_of(argument: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument of a collective operator stands for, if any."""
    if isinstance(argument, str):
        try:
            return distributed_c10d._resolve_process_group(argument)  # type: ignore[attr-defined,arg-type]
        except (RuntimeError, ValueError):
            return None
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):
            return None
    return None
