"""Every use that titan-core makes of private torch API, for titan-core alone. Checked with torch 2.11 to 2.15:

* ``DeviceMesh._concatenate``, ``_flatten`` and ``_unflatten``: torch has no public way to refold mesh dimensions.
* ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``: the public function rejects strided shards.
* ``DTensor._op_dispatcher``, ``torch._C._clear_DTensor_sharding_propagator_cache`` and the caches of
  ``torch.distributed.tensor._redistribute`` and ``_collective_utils.MeshTopoInfo``.
* ``DTensor._local_tensor``: ``to_local`` makes a view of each parameter, to mark it as one.
* ``DTensor._spec`` and ``DTensor.__new__(DTensor, local_tensor, spec, requires_grad=...)``: the public ``from_local`` takes
  several times the host time.
* ``torch._C._will_engine_execute_node``, ``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks``: whether a
  gradient is added to ``.grad`` and nothing else.
* ``torch.distributed.distributed_c10d._world.pg_map``: the table of process groups.
* ``torch.distributed.device_mesh.new_group`` and ``split_group``: public functions, replaced while a device mesh calls them,
  because its ``backend_override`` does not reach groups that it splits from the group of all ranks (torch 2.15).
* ``ProcessGroupGloo.__init__``, replaced while a job runs, and ``ProcessGroupGloo._Options`` with ``_threads``, ``_devices``
  and ``_timeout``: torch ignores the options of a gloo group (``pg_options``).
* ``torch.utils._python_dispatch.TorchDispatchMode``.
* ``_init_group`` of torch's optimizers, which collects the tensors of an update; and their attributes ``found_inf`` and
  ``grad_scale``, through which ``torch.amp.GradScaler`` lets fused optimizers skip a step.
* ``torch._foreach_mul_``, ``Tensor._version``, ``OpOverload._schema``, and the hook tables of ``nn.Module``.
* ``torch.ops.torch_attn._varlen_attn``: the operator behind ``torch.nn.attention.varlen.varlen_attn``.
* ``torch._dynamo.convert_frame.FRAME_COUNTER``, to see whether anything was compiled.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@contextmanager
def mesh_groups(device_type: str, host_tensors: bool) -> Iterator[None]:
    """Keep the process groups of the meshes made within the block few, because each group of gloo connects to all its ranks.

    On the CPU, meshes of the same ranks share one group. On other devices they do not, because collectives of one group wait
    for each other; there a group has only the device's backend, unless it must also work on ``host_tensors``.
    """
    module: Any = device_mesh
    new_group, split_group = module.new_group, module.split_group
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    backend = f"{device_type}:{backends.get(device_type)}"
    made: dict[tuple[int, ...], Any] = {tuple(range(dist.get_world_size())): dist.group.WORLD}

    def new_or_shared(ranks: Sequence[int], **options: Any) -> Any:  # all ranks make the same calls
        if tuple(ranks) not in made:
            made[tuple(ranks)] = new_group(ranks=ranks, **options)
        return made[tuple(ranks)]

    def new_on_device(ranks: Sequence[int], **options: Any) -> Any:
        return new_group(ranks=ranks, **{**options, "backend": backend})

    def split_one_by_one(split_ranks: Sequence[Sequence[int]], parent_pg: object, **options: Any) -> Any:
        found = [new_on_device(list(ranks), **options) for ranks in split_ranks]
        return next(group for group in found if isinstance(group, dist.ProcessGroup))  # a dimension includes every rank

    if device_type == "cpu":
        module.new_group = new_or_shared
    elif len(set(backends.values())) > 1 and not host_tensors:
        module.new_group = new_on_device
        chooses_backend = "backend" in inspect.signature(split_group).parameters  # torch 2.15, not 2.11
        module.split_group = partial(split_group, backend=backend) if chooses_backend else split_one_by_one
    try:
        yield
    finally:
        module.new_group, module.split_group = new_group, split_group


@contextmanager
def one_worker_per_gloo_group() -> Iterator[None]:
    """Let each group of gloo that is made within the block run its collectives in one thread, where torch starts two.

    Two corrupt the heap (``ProcessGroupGloo::runLoop``, pytorch pull request 152614, torch 2.11 to 2.15): when a
    collective has ended and the caller has been woken, its thread assigns the name of the operation to a string of the
    group, without a lock. Meanwhile the thread of the next collective may do the same. Names of functional collectives,
    such as ``ALLGATHER_COALESCED``, are too long to be stored in the string itself, so a thread that loses the processor
    there writes into memory that the other one has freed: ``malloc(): unaligned tcache chunk detected``. All ranks call
    the collectives of a group in one order, so one thread, which keeps it, cannot deadlock.
    """
    if not dist.is_gloo_available():
        yield
        return
    group: Any = dist.ProcessGroupGloo
    start = group.__init__

    def start_one(
        own: Any, store: object, rank: int, size: int, timeout: Any = default_pg_timeout, options: Any = None, **more: Any
    ) -> None:
        if isinstance(timeout, group._Options):  # one signature of torch's takes options, the other a timeout
            options = timeout
        if options is None:
            options = group._Options()
            options._devices, options._timeout = _gloo_devices(), timeout
        options._threads = 1
        if more.pop("enable_reconfigure", False):  # of torch 2.15
            options.enable_reconfigure = True
        start(own, store, rank, size, options, **more)

    group.__init__ = start_one
    try:
        yield
    finally:
        group.__init__ = start


def _gloo_devices() -> list[Any]:
    """Return the network devices that torch chooses for a group of gloo."""
    group: Any = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [group.create_device(interface=name) for name in interfaces] or [group.create_default_device()]


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the dimensions of all ``meshes``, in order."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh of one dimension, called ``name``, with all ranks of ``mesh``. Every rank must call this."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the one-dimensional ``mesh`` refolded into dimensions ``names`` of ``sizes``. Every rank must call this."""
    return mesh._unflatten(0, sizes, names)


def global_offset(tensor: DTensor) -> tuple[int, ...]:
    """Return the global index of the first element of this rank's shard."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def forget_meshes() -> None:
    """Clear DTensor's caches. Their keys are mesh shapes, and their values hold process groups that may be destroyed.

    A group that is alive when Python exits may abort the process: its threads still run, and one that releases a tensor then
    is ended by Python within C++ code ("terminate called without an active exception")."""
    # As ``torch.distributed.tensor.debug._clear_sharding_prop_cache``, whose module imports the compiler (2 s).
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def reset_compiler() -> None:
    """Call :func:`torch.compiler.reset`, only if something was compiled: on a GPU it imports inductor (3 s)."""
    frames = sys.modules.get("torch._dynamo.convert_frame")  # the first optimizer imports it
    if frames is not None and frames.FRAME_COUNTER:
        torch.compiler.reset()


def process_groups() -> list[dist.ProcessGroup]:
    """Return every process group that this rank belongs to."""
    return list(distributed_c10d._world.pg_map)


class OnLocalShards:
    """A base, before torch's class, for optimizers that compute each element on its own. The update runs on this rank's
    shards, as plain tensors: DTensor's dispatch takes longer than the update of a small model. Parameters, gradients and
    state remain DTensors for everyone else, so state and checkpoints do not change."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        parameters, gradients = lists[:2]
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return has_complex
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            # Under tensor parallelism, the gradient of a divided table may be whole.
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                gradients[number] = gradient.redistribute(placements=parameter.placements)
        for tensors in lists:
            # Not ``to_local``, which makes a view of each parameter to mark it as one.
            tensors[:] = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return has_complex


def step_unless(optimizer: Any, skip: Tensor) -> None:
    """Take a step of a fused ``optimizer`` of torch's unless ``skip``, a 0-d bool on the device, is true. The device
    decides, so the host need not know."""
    optimizer.grad_scale, optimizer.found_inf = None, skip.float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def multiply_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all ``tensors``, on one device, by a scalar tensor in place: a few kernels, not one per tensor."""
    torch._foreach_mul_(list(tensors), factor)


def named_arguments(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``operator`` by name, with its defaults."""
    declared = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    names = (argument.name for argument in declared)
    return {**defaults, **dict(zip(names, arguments, strict=False)), **keywords}


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of the in-place changes to ``tensor``."""
    return tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return :func:`version_of` each of ``tensors``, some 40 ns each."""
    return [tensor._version for tensor in tensors]


def sharding_of(tensor: DTensor) -> object:
    """Return the mesh, placements and global shape of ``tensor``, for :func:`sharded_like`."""
    return tensor._spec


def sharded_like(sharding: Any, local: Tensor) -> DTensor:
    """Return ``local`` as this rank's shard of a DTensor with ``sharding``. Has no gradient."""
    # Not its ``__init__``: that does nothing, but through a decorator that takes twice as long as the rest (torch 2.15).
    shard: DTensor = DTensor.__new__(DTensor, local, sharding, requires_grad=False)
    return shard


def accumulates(node: Any, leaf: Tensor, gradient: Tensor) -> bool:
    """Whether all that the backward pass does with ``gradient``, which ``node`` returns for its only input ``leaf``, is to
    add it to ``leaf.grad`` as it is."""
    if (
        gradient.dtype != leaf.grad_dtype
        or torch.is_grad_enabled()
        or not leaf.is_leaf
        or leaf._backward_hooks
        or leaf._post_accumulate_grad_hooks
    ):
        return False
    try:
        added: bool = torch._C._will_engine_execute_node(node.next_functions[0][0])
    except RuntimeError:  # raised in torch.autograd.grad, which returns the gradients instead
        return False
    return added


def local_tensor(tensor: DTensor) -> Tensor:
    """Return this rank's shard itself, where ``to_local`` returns a view."""
    return tensor._local_tensor


def variable_length_attention() -> Any:
    """Return the operator of variable-length attention, whose result recomputation may keep."""
    import torch.nn.attention.varlen  # registers it

    return torch.ops.torch_attn._varlen_attn.default


def number_of_hooks(module: nn.Module) -> int:
    """Return the number of forward hooks and forward pre-hooks on ``module``."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)
