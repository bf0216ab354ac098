"""All private PyTorch API that this package uses. Checked with torch 2.11 to 2.15.

* ``torch._subclasses.fake_tensor``: tensors with a device and a shape but no values. torch has no public way to make them.
* ``torch.testing._internal.distributed.fake_pg``: a process group whose collectives do nothing.
* ``torch.utils._python_dispatch``: dispatch modes, which see every operator.
* ``torch._C._set_only_lift_cpu_tensors``: makes ``torch.tensor(..., device="cuda")`` show its copy to the device to modes.
* ``torch._C._get_dispatch_mode``: whether torch's own code runs in a fake mode, as DTensor does to find shapes.
* ``FakeTensor._make_subclass`` and its attributes: another fake tensor like one that torch made, 20 times as fast.
* ``TorchDispatchMode._should_skip_dynamo``: torch wraps a mode's method to keep the compiler out. Nothing is compiled here.
* ``torch._C._current_graph_task_id``: whether a backward pass is running.
* ``torch._C._cuda_getCurrentStream``: the number of the current stream, 20 times as fast as ``torch.cuda.current_stream``.
* ``torch._ops.OpOverload``: the class of operators; ``torch.ops._c10d_functional``: functional collectives.
* ``torch.ops.aten._to_copy``, ``._pin_memory``, ``._local_scalar_dense``, ``._unique2``: have rules of their own.
* ``_n_microbatches``, ``_stages`` of pipeline schedules: what a schedule runs. ``pipeline_order`` is public.
* ``pipeline_order_with_comms`` of schedules: since torch 2.15, how long a schedule keeps what it has sent.
* ``UntypedStorage._cdata``: identifies a storage; ``distributed_c10d._resolve_process_group``: a group by its name.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type,
)

_aten = torch.ops.aten
TO_COPY: Final = _aten._to_copy.default
PIN_MEMORY: Final = _aten._pin_memory.default
NUMBERS: Final = frozenset({_aten._local_scalar_dense.default, _aten.item.default})
"""Operators that read a value of a tensor."""
SIZES_FROM_VALUES: Final = frozenset(
    {
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_dim.default,
        _aten.unique_consecutive.default,
        _aten.bincount.default,
        _aten.equal.default,
        _aten.repeat_interleave.Tensor,
    }
)
"""Operators whose result has a size, or is a number, that depends on values."""


_functional = torch.ops._c10d_functional
WAITS: Final = tuple(
    getattr(_functional, name).default
    for name in ("wait_tensor", "_wrap_tensor_autograd")  # the second one since torch 2.15
    if hasattr(_functional, name)
)
"""Operators that pass on the result of a collective."""
ALL_TO_ALL: Final = _functional.all_to_all_single.default
ALL_GATHER: Final = _functional.all_gather_into_tensor.default
ALL_REDUCE: Final = _functional.all_reduce.default
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


def fake_state(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    """Return what all fake tensors on ``device`` have in common, for :func:`another_fake`."""
    return dict(vars(FakeTensor(mode, torch.empty((), device="meta"), device)))


def another_fake(elements: Tensor, device: torch.device, state: dict[str, Any]) -> Tensor:
    """Return a fake tensor on ``device`` with the shape of ``elements``, which is on the meta device."""
    tensor: Any = Tensor._make_subclass(FakeTensor, elements, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor.__dict__.update(state)
    return tensor


def is_composite(operator: Any) -> bool:
    """Whether ``operator`` may be decomposed into others before or after it reaches a mode."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def is_wrapper(kind: type) -> bool:
    """Whether tensors of class ``kind`` consist of other tensors, as DTensors do."""
    return is_traceable_wrapper_subclass_type(kind)


def only_lift_cpu_tensors(on: bool) -> bool:
    """Set whether ``torch.tensor`` makes tensors on the CPU and then copies them, visibly; return the previous setting."""
    before: bool = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(on)
    return before


def in_foreign_fake_mode() -> bool:
    """Whether torch's own code computes shapes in a fake mode of its own."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def current_stream() -> int:
    """Return the number of the stream on which this thread's operators run."""
    number: int = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())[0]
    return number


def storage_key(storage: UntypedStorage) -> int:
    """Return a number that identifies a living storage."""
    return storage._cdata


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Make the default process group: ``rank`` of ``world_size`` ranks, the others of which do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


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


def is_view(operator: Any) -> bool:
    """Whether ``operator`` returns a view of its argument, and so neither computes nor allocates."""
    return isinstance(operator, OpOverload) and operator.is_view


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of ``tensor``."""
    return tensor.numel() * tensor.element_size()


def microbatches_of_schedule(schedule: Any) -> int:
    """Return the number of microbatches of one of torch's pipeline schedules."""
    count: int = schedule._n_microbatches
    return count


def _stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def ranks_and_stages(schedule: Any) -> tuple[int, tuple[int, ...]]:
    """Return the number of ranks of a pipeline, and the rank of each stage."""
    stage = _stages(schedule)[0]
    table = stage.stage_index_to_group_rank
    return stage.group_size, tuple(table[number] for number in range(stage.num_stages))


def with_microbatches(schedule: Any, microbatches: int) -> Any:
    """Return a schedule with several stages per rank with another number of microbatches."""
    if microbatches == schedule._n_microbatches:
        return schedule
    return type(schedule)(_stages(schedule), microbatches, loss_fn=lambda *args: None)


def most_pending_sends(schedule: Any) -> int:
    """Return how many tensors that this rank has sent a schedule with several stages per rank keeps at most: until a later
    action waits for them. 0 if the schedule does not say."""
    pending = most = 0
    for action in getattr(schedule, "pipeline_order_with_comms", {}).get(schedule.rank, ()):
        name = action.computation_type.name
        pending += name in ("SEND_F", "SEND_B")
        pending -= name in ("WAIT_SEND_F", "WAIT_SEND_B")
        most = max(most, pending)
    return most


def order_of_schedule(schedule: Any) -> list[list[tuple[str, int, int]]]:
    """Return what each rank does in a schedule with several stages per rank."""
    order = schedule.pipeline_order
    found = []
    for rank in sorted(order):
        actions = []
        for action in order[rank]:
            if action is None:
                continue
            for one in getattr(action, "sub_actions", None) or (action,):
                if one.computation_type.value in ("F", "B", "I", "W"):
                    actions.append((one.computation_type.value, one.stage_index, one.microbatch_index))
        found.append(actions)
    return found
