"""Values of integer tensors on the simulated device, where sizes of later results depend on them.

A mixture of experts splits its rows by counts that only the router's numbers determine. Here, indices that a model chooses
by its numbers are spread evenly: the first row chooses index 0, the next one 1, and so on. What integer operators make of
indices, constants and ranges is computed for real, on the host, so counts add up. Other ranks send what this one sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from titan_simulate.torch_private import FakeTensor, process_group_of

_aten = torch.ops.aten
MOST_BYTES = 2**26
"""Size of the largest tensor whose values are known."""
_CHOSEN: dict[Any, tuple[int, int]] = {
    _aten.topk.default: (1, 2), _aten.argmax.default: (0, 1), _aten.max.dim: (1, 1), _aten.multinomial.default: (0, 9),
}  # fmt: skip
"""Operators that choose indices by numbers -> which of the results they are, and the position of the argument ``dim``."""
_MADE = frozenset(
    {
        _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.full.default, _aten.zeros.default,
        _aten.ones.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
        _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
    }
)  # fmt: skip
"""Operators whose result does not depend on values of tensors."""
_ORDERS = frozenset({_aten.argsort.default, _aten.argsort.stable})
"""Operators whose results are permutations: no size depends on those, and sorting takes long."""
_SORTS: dict[Any, tuple[int, int]] = {_aten.sort.default: (1, 2), _aten.sort.stable: (2, 3)}
"""Operators that return sorted values, and their permutation -> positions of ``dim`` and ``descending``."""
_ATTRIBUTE = "titan_values"


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on the simulated device, as a tensor on the host, if they are known."""
    return tensor.__dict__.get(_ATTRIBUTE)


def all_known(tensors: Sequence[Tensor]) -> bool:
    """Whether the values of all ``tensors`` are known, and there are any."""
    return bool(tensors) and all(_ATTRIBUTE in tensor.__dict__ for tensor in tensors)


def follow(operator: Any, args: Sequence[Any], keywords: dict[str, Any], tensors: Sequence[Tensor], result: Any) -> None:
    """Find the values of the ``result`` of ``operator``, which has ``tensors`` among its arguments."""
    if operator in _CHOSEN:
        which, position = _CHOSEN[operator]
        indices = result[which] if isinstance(result, (list, tuple)) else result
        dim = (
            args[position] if len(args) > position else keywords.get("dim", None if operator is _aten.argmax.default else -1)
        )
        size = args[0].numel() if dim is None else args[0].size(dim)
        if _may_be_known(indices):
            attach(indices, torch.arange(indices.numel()).remainder_(max(1, size)).view(indices.shape))
    elif operator in _SORTS:
        if all_known(tensors) and _may_be_known(result[0]):
            attach(result[0], _sorted(operator, args, keywords))
    elif operator in _MADE or (operator not in _ORDERS and all_known(tensors)):
        if _may_be_known(result[0] if isinstance(result, (list, tuple)) and result else result):
            attach(result, compute(operator, args, keywords))
    elif isinstance(result, Tensor) and any(result is tensor for tensor in tensors):
        result.__dict__.pop(_ATTRIBUTE, None)  # overwritten with values that are not known


def _sorted(operator: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Tensor:
    """Return the sorted values alone: their permutation takes ten times as long."""
    dim, descending = (
        args[position] if len(args) > position else keywords.get(name, default)
        for position, name, default in zip(_SORTS[operator], ("dim", "descending"), (-1, False), strict=True)
    )
    found = torch.from_numpy(numpy.sort(_on_host(args[0]).numpy(), axis=dim))
    return found.flip(dim) if descending else found


def compute(operator: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Return what ``operator`` makes of known values, on the host; ``None`` if the host cannot compute it."""
    on_host = [_on_host(argument) for argument in args]
    if (collective := _COLLECTIVES.get(operator.name())) is not None:
        return collective(on_host)
    if operator.namespace != "aten":
        return None
    named = {name: _on_host(value) for name, value in keywords.items() if name != "pin_memory"}
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    try:
        return operator(*on_host, **named)
    except RuntimeError:  # no such kernel for integers on the host: a size that needs these values is an error
        return None


def attach(result: Any, values: Any) -> None:
    """Let the tensors in ``result`` have ``values``, which have the same structure."""
    if isinstance(result, (list, tuple)) and isinstance(values, (list, tuple)):
        for one, known in zip(result, values, strict=True):
            attach(one, known)
    elif _may_be_known(result) and isinstance(values, Tensor) and values.shape == result.shape:
        result.__dict__[_ATTRIBUTE] = values


def _may_be_known(tensor: Any) -> bool:
    return (
        type(tensor) is FakeTensor
        and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.nbytes <= MOST_BYTES
    )


def _on_host(argument: Any) -> Any:
    if type(argument) is FakeTensor:
        known = values_of(argument)
        return torch.empty(argument.shape, dtype=argument.dtype) if known is None else known
    if isinstance(argument, (list, tuple)):
        return type(argument)(_on_host(item) for item in argument)
    return argument


def _exchanged(args: Sequence[Any]) -> Tensor:
    """All-to-all: each rank sends this rank the piece that this rank sends to itself."""
    values, _, sent, name = args
    group = process_group_of(name)
    piece: Tensor = values.split(sent)[dist.get_rank(group)]
    return torch.cat([piece] * len(sent))


def _reduced(args: Sequence[Any]) -> Tensor:
    values, how, name = args
    result: Tensor = values * dist.get_world_size(process_group_of(name)) if how == "sum" else values
    return result


_COLLECTIVES: dict[str, Callable[[Sequence[Any]], Tensor]] = {
    "_c10d_functional::wait_tensor": lambda args: args[0],
    "_c10d_functional::_wrap_tensor_autograd": lambda args: args[0],  # since torch 2.15
    "_c10d_functional::all_to_all_single": _exchanged,
    "_c10d_functional::all_gather_into_tensor": lambda args: torch.cat([args[0]] * args[1]),
    "_c10d_functional::all_reduce": _reduced,
}
"""Functional collectives by name."""
