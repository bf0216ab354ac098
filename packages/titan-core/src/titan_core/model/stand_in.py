"""Stand-ins: small real copies of models on the meta device, to try a forward pass on a few tokens.

A stand-in runs the code of the model on other numbers. Weights are random; a large one overlaps itself in memory, and so
takes the memory of a few rows. Matmuls with large weights compute a few columns and repeat them. Random draws are constants.
Blocks that are built like an earlier block are replaced by an addition. A 405B model is tried in a second with some
megabytes.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import ModelLayout, matches
from titan_core.api.parallel.model_part import PrunedModule
from titan_core.model.draws import Draws
from titan_core.toolkit.random_state import draws
from titan_core.torch_private import TorchDispatchMode, number_of_hooks

LARGE = 1 << 20
"""Weights with more elements than this overlap themselves."""

_COLUMNS = 8
"""Number of columns that a matmul with a large weight computes."""

_aten = torch.ops.aten


def stand_in(model: nn.Module, layout: ModelLayout, device: torch.device) -> nn.Module:
    """Return a copy of ``model`` with random weights on ``device``, in training mode. ``model`` is not changed."""
    generator = torch.Generator().manual_seed(0)
    real = copy.deepcopy(model, replaced_blocks(model, layout))
    made: dict[int, nn.Parameter] = {}  # shared parameters stay shared
    for path, module in real.named_modules():
        for name, parameter in _parameters(module).items():
            if id(parameter) not in made:
                values = _random(parameter, generator).to(device)
                made[id(parameter)] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, made[id(parameter)])  # recurrent modules keep references, which ``setattr`` updates
        for name, buffer in _buffers(module).items():
            setattr(module, name, _buffer(f"{path}.{name}".lstrip("."), buffer, layout, generator).to(device))
    return real.train()


class Repeated(PrunedModule):
    """Replaces a block that is built like an earlier one. Transforms treat it as a block of another rank. Each adds a
    different number, so that a wrong order shows."""

    def __init__(self, number: int, block: nn.Module) -> None:
        """
        Args:
            block: the replaced block. The model's code may read its plain attributes.
        """
        super().__init__()
        self._number = number
        vars(self).update({name: value for name, value in vars(block).items() if name[0] != "_" and _is_plain(value)})

    def forward(self, hidden: Tensor, *arguments: object, **keywords: object) -> Tensor:
        """Return ``hidden``, slightly changed."""
        return hidden + torch.sin(hidden + self._number)


def first_alike(model: nn.Module, layout: ModelLayout) -> dict[str, str]:
    """Return block name -> name of the first block that is built like it, which represents it in a stand-in."""
    first: dict[Any, str] = {}
    blocks = {f"{layout.blocks}.{name}": block for name, block in model.get_submodule(layout.blocks).named_children()}
    numbers = _numbers(list(blocks.values()))
    return {path: first.setdefault(_structure(block, path, layout, numbers), path) for path, block in blocks.items()}


def replaced_blocks(model: nn.Module, layout: ModelLayout) -> dict[int, Any]:
    """Return the memo for ``copy.deepcopy``: id of each block that is built like an earlier one -> its replacement."""
    repeated = [(number, path) for number, (path, first) in enumerate(first_alike(model, layout).items()) if path != first]
    blocks = [(number, model.get_submodule(path)) for number, path in repeated]
    return {id(block): Repeated(number, block) for number, block in blocks}


def _numbers(blocks: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Return the attributes that hold the number of their block, as (module within the block, attribute): those that do so
    in each block that has them, and in more than two, where 0 and 1 may be choices."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for number, block in enumerate(blocks):
        for name, module in block.named_modules():
            for key, value in vars(module).items():
                found[name, key].append(type(value) is int and value == number)
    return {place for place, same in found.items() if len(same) > 2 and all(same)}


def _structure(block: nn.Module, path: str, layout: ModelLayout, numbers: Collection[tuple[str, str]]) -> Any:
    """Return a key that is equal for two blocks if they differ only in weights and in their ``numbers``, and are divided
    alike."""
    fields = (layout.regions, layout.sums)
    return tuple(
        (
            name,
            type(module),
            tuple(matches(f"{path}.{name}", patterns) for patterns in fields),
            layout.mixer(f"{path}.{name}"),
            tuple(layout.rule(".".join(filter(None, (path, name, key)))) for key in _parameters(module)),
            tuple(
                (key, _plain(value))
                for key, value in sorted(vars(module).items())
                if not key.startswith("_") and (name, key) not in numbers
            ),
            tuple((key, one.shape, one.dtype, one.requires_grad) for key, one in _parameters(module).items()),
            tuple((key, buffer.shape, buffer.dtype) for key, buffer in _buffers(module).items()),
            number_of_hooks(module),
        )
        for name, module in block.named_modules()
    )


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _plain(value: Any) -> Any:
    """Return a comparable form of ``value``: the value itself if it is plain, else its identity."""
    if _is_plain(value):
        return value
    return tuple(map(_plain, value)) if isinstance(value, tuple) else id(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return nonzero values of the magnitude of trained weights, with ``like``'s shape and dtype."""
    shape = tuple(like.shape)
    elements = sum(shape) if like.numel() > LARGE else like.numel()
    if len(shape) < 2:
        values = 0.5 + torch.rand(max(1, elements), generator=generator)
    else:
        fan = min(like.numel() // max(1, shape[0]), max(shape[-2:]))
        values = torch.randn(max(1, elements), generator=generator) / math.sqrt(max(1, fan))
    if like.is_complex():
        values = torch.polar(values.abs(), 6.0 * values)
    values = values.to(like.dtype)
    if like.numel() > LARGE and len(shape) > 1:
        return values.as_strided(shape, (1,) * len(shape))
    return values[: like.numel()].view(shape)


def _buffer(path: str, like: Tensor, layout: ModelLayout, generator: torch.Generator) -> Tensor:
    """Return the buffer's own values, or random values for a large table, which is slow to compute."""
    if like.numel() > LARGE and (like.is_floating_point() or like.is_complex()):
        return _random(like, generator)
    compute = next(compute for pattern, compute in layout.buffers.items() if matches(path, [pattern]))
    return compute().to(like.dtype).view(like.shape)


class StandInMode(TorchDispatchMode):
    """Active during calls of a stand-in: shortens matmuls with large weights and makes random draws constant."""

    def __init__(self, model: nn.Module, draws: Draws | None = None) -> None:
        """
        Args:
            draws: what random operators return.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws or Draws()
        self.flops = 0.0
        """Floating-point operations of matmuls so far."""
        large = (weight.untyped_storage() for weight in model.parameters() if weight.numel() > LARGE)
        self._large = {storage.data_ptr() for storage in large}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = self._computed(operator, arguments, keywords or {})
        self.flops += _operations(operator, arguments, result)
        return result

    def _computed(self, operator: Any, arguments: Any, keywords: Any) -> Any:
        if operator.overloadpacket in (_aten.mm, _aten.bmm):
            return self._matmul(operator, *arguments)
        if operator.overloadpacket in (_aten.addmm, _aten.baddbmm):
            return self._add_matmul(operator, *arguments, **keywords)
        if draws(operator, arguments, keywords):
            return self._draws.draw(operator, *arguments, **keywords)
        return operator(*arguments, **keywords)

    def _matmul(self, operator: Any, a: Tensor, b: Tensor) -> Tensor:
        if self._is_large(b):
            return _repeated(operator(a, b[..., :_COLUMNS]), b.shape[-1], dim=-1)
        if self._is_large(a):
            return _repeated(operator(a[..., :_COLUMNS, :], b), a.shape[-2], dim=-2)
        return operator(a, b)

    def _add_matmul(self, operator: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not (self._is_large(a) or self._is_large(b)):
            return operator(c, a, b, beta=beta, alpha=alpha)
        return beta * c + alpha * self._matmul(_aten.mm if a.dim() == 2 else _aten.bmm, a, b)

    def _is_large(self, tensor: Tensor) -> bool:
        return bool(self._large) and tensor.untyped_storage().data_ptr() in self._large


def _repeated(tensor: Tensor, size: int, dim: int) -> Tensor:
    repeats = [1] * tensor.dim()
    repeats[dim] = -(-size // tensor.shape[dim])
    return tensor.repeat(repeats).narrow(dim, 0, size).contiguous()


def _operations(operator: Any, arguments: Any, result: Any) -> float:
    """Return the floating-point operations of a call of an operator that multiplies matrices; 0 of any other."""
    kind = operator.overloadpacket
    if kind in (_aten.mm, _aten.bmm) or kind.__name__ == "_grouped_mm":
        return 2.0 * result.numel() * arguments[0].shape[-1]
    if kind in (_aten.addmm, _aten.baddbmm):
        return 2.0 * result.numel() * arguments[1].shape[-1]
    if kind is _aten.convolution:
        return 2.0 * result.numel() * arguments[1][0].numel()
    if kind.__name__.startswith("_scaled_dot_product"):
        q, k, v = arguments[:3]
        return 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return 0.0
