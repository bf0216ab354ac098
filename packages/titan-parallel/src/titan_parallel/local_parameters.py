"""Modules of any class that compute with this rank's shards of their parameters.

The parameters are DTensors, like all parameters of a sharded model, so optimizers, checkpoints and the gradient norm handle
one kind. When the module's code reads one (``self.weight``), it gets this rank's shard as a plain tensor: the code may use
operators that DTensor does not support, and no operator is dispatched twice. torch's parametrizations read parameters in
the same way, through properties of a generated class, but they rename the parameters.

Token embeddings shard their rows, the vocabulary (Shoeybi et al., arXiv 1909.08053, section 3).

The gradient has its parameter's placement. That of a replicated parameter may be this rank's addend nevertheless:
:mod:`titan_parallel.partial_gradients` sums those once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from titan_core.api import UserError
from titan_core.toolkit.local_shards import local_shard as local_shard_of
from titan_parallel.region_collectives import Positions
from titan_parallel.torch_private import registered_parameter


def divide_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], hidden: Collection[str] = ()
) -> None:
    """Shard the parameters that ``module`` itself owns, and let its code read this rank's shards.

    Args:
        mesh: of one dimension.
        placements: placement of each of the module's own parameters.
        hidden: parameters that the module's code finds to be ``None``, although they exist.
    """
    for name, placement in placements.items():
        whole = registered_parameter(module, name)
        assert whole is not None
        divided = distribute_tensor(whole, mesh, [placement])
        module.register_parameter(name, nn.Parameter(divided, requires_grad=whole.requires_grad))
    cls: Any = type(module)  # hashable, which mypy doubts
    module.__class__ = _with_local_parameters(cls, tuple(name for name in placements if name not in hidden), tuple(hidden))


@cache
def _with_local_parameters(cls: type[nn.Module], names: tuple[str, ...], hidden: tuple[str, ...]) -> type[nn.Module]:
    """Return one class for all modules with these parameters. Compiled blocks guard on the classes of their modules."""
    readers = {name: property(_reader(name)) for name in names}
    return type(cls.__name__, (cls,), readers | {name: property(_reader(name, hidden=True)) for name in hidden})


def _reader(name: str, hidden: bool = False) -> Callable[[nn.Module], Tensor | None]:
    def read(module: nn.Module) -> Tensor | None:
        parameter = registered_parameter(module, name)
        return None if hidden and _is_in_use(parameter) else local_shard(parameter)

    return read


def local_shard(parameter: Tensor | None) -> Tensor | None:
    """Return this rank's shard of a parameter that tensor parallelism has divided, as autograd sees it."""
    return local_shard_of(parameter) if _is_in_use(parameter) else parameter


def _is_in_use(parameter: Tensor | None) -> TypeGuard[DTensor]:
    """Whether a forward pass reads the parameter. Between forward passes FSDP shards it once more, over a second mesh
    dimension, and expects the DTensor itself."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1


def divide_embedding(module: nn.Embedding, name: str, mesh: DeviceMesh, positions: Positions) -> None:
    """Shard the rows of ``module``. Each rank looks up the tokens in its rows; the sum over ranks is held by ``positions``.

    Raises:
        UserError: the module has an option that depends on which tokens a batch has.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            why = f"has {option}, which tensor parallelism cannot compute from a rank's rows"
            raise UserError.one(f"module {name!r} of the model", why, f"build it without {option}")
    rows = -(-module.num_embeddings // mesh.size())  # the last ranks may hold fewer, or none
    first = min(mesh.get_local_rank() * rows, module.num_embeddings)
    end = min(first + rows, module.num_embeddings)
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - first if first <= module.padding_idx < end else None
    divide_parameters(module, mesh, {"weight": Shard(0)})
    compute: Any = module.forward

    def forward(tokens: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        mine = (tokens >= first) & (tokens < end)
        if first < end:
            found = compute(torch.where(mine, tokens - first, 0), *arguments, **keywords)
        else:  # no rows: zeros that depend on the weight, so that it has a gradient on every rank
            found = module.weight.new_zeros(*tokens.shape, module.weight.shape[1]) + module.weight.sum()
        return positions.leave(found.masked_fill(~mine[..., None], 0.0))

    replaced: Any = module
    replaced.forward = forward
