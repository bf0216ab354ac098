"""The initial values of a model's parameters: what the library's ``_init_weights`` draws for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.library import refusal
from titan_models_hf.torch_private import whole_of

Value = tuple[str, tuple[float, ...]]
"""Name of an initial value (:data:`titan_models_hf.layout.VALUES`), its arguments."""


def _normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Value | None:
    if std == 0:
        return "constant", (float(mean),)
    return ("normal", (float(std),)) if mean == 0 else None


def _truncated(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Value | None:
    return ("truncated normal", (float(std), float(b / std))) if mean == 0 and a == -b else None


def _uniform(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Value:
    return "uniform", (float(a), float(b))


def _fans(tensor: Tensor) -> tuple[int, int]:
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def _xavier_uniform(tensor: Tensor, gain: float = 1.0, generator: Any = None) -> Value:
    bound = gain * math.sqrt(6.0 / sum(_fans(tensor)))
    return "uniform", (-bound, bound)


def _xavier_normal(tensor: Tensor, gain: float = 1.0, generator: Any = None) -> Value:
    return "normal", (gain * math.sqrt(2.0 / sum(_fans(tensor))),)


_VALUES: dict[str, Callable[..., Value | None]] = {
    "normal_": _normal,
    "trunc_normal_": _truncated,
    "uniform_": _uniform,
    "xavier_uniform_": _xavier_uniform,
    "xavier_normal_": _xavier_normal,
    "constant_": lambda tensor, val: ("constant", (float(val),)),
    "ones_": lambda tensor: ("constant", (1.0,)),
    "zeros_": lambda tensor: ("constant", (0.0,)),
}


def initial_values(args: HFArgs, model: Any) -> dict[str, Value]:
    """Return the initial value of each parameter of ``model``, which is on the meta device.

    Raises:
        UserError: one is neither a constant nor a random draw that Titan knows.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, Value | None] = {}

    def record(value_of: Callable[..., Value | None]) -> Callable[..., Tensor]:
        def fill(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            if (name := names.get(id(tensor))) is not None:
                values[name] = value_of(tensor, *arguments, **keywords)
            elif (name := names.get(id(whole_of(tensor)))) is not None:
                values[name] = None  # a part of a parameter has a value of its own
            return tensor

        return fill

    recorders = {
        name: record(_VALUES.get(name, lambda tensor, *arguments, **keywords: None)) for name in library.INITIALIZERS
    }
    with library.patched_initialization(recorders):
        for module in reversed(list(model.modules())):
            library.init_weights(model, module)
    for name in names.values():
        if values.get(name) is None:
            values[name] = _computed(model, name)
    unknown = [name for name in names.values() if values.get(name) is None]
    if unknown:
        shown = ", ".join(map(repr, unknown[:3])) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        raise refusal(args, f"the initial values of {shown} are neither constants nor independent random draws")
    return {name: value for name, value in values.items() if value is not None}


def _computed(model: Any, name: str) -> Value | None:
    """Return a value that the library computes otherwise, of a vector on the CPU: numbers by index, or logarithms of a draw.
    ``None``: neither."""
    owner, _, leaf = name.rpartition(".")
    if model.get_parameter(name).dim() != 1:
        return None
    quarter, bounds = _drawn(model, owner, leaf, 0.25)
    most, _ = _drawn(model, owner, leaf, 0.75)
    if torch.equal(quarter, most):
        return "by index", tuple(quarter.tolist())
    if len(bounds) != 1:
        return None
    low, high = bounds[0]
    expected = [torch.full_like(quarter, low + share * (high - low)).log() for share in (0.25, 0.75)]
    same = all(torch.allclose(one, other) for one, other in zip((quarter, most), expected, strict=True))
    return ("log uniform", (low, high)) if same else None


def _drawn(model: Any, owner: str, leaf: str, share: float) -> tuple[Tensor, list[tuple[float, float]]]:
    """Return the initial values of a parameter whose uniform draws are all at ``share`` of their range, and these ranges."""
    bounds: list[tuple[float, float]] = []

    def uniform(tensor: Tensor, low: float = 0.0, high: float = 1.0, **keywords: Any) -> Tensor:
        bounds.append((low, high))
        return tensor.fill_(low + share * (high - low))

    module = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu")
    with torch.device("cpu"), torch.no_grad(), library.patched_draws(uniform):
        module.get_parameter(leaf).fill_(math.nan)
        library.init_weights(model, module)
    return module.get_parameter(leaf).detach(), bounds
