"""The initial values of a model's parameters: what the library's ``_init_weights`` draws for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.library import refusal
from titan_models_hf.programs import ProgramRecorder
from titan_models_hf.torch_private import whole_of

_UNKNOWN = "the library draws it neither as a constant nor as independent random numbers"
JOINED = "the library computes values for a parameter that it is a part of"
"""Reasons why a parameter must be loaded."""

Value = tuple[str, tuple[float | str, ...]]
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


def _kaiming_uniform(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None
) -> Value | None:
    if nonlinearity != "leaky_relu":
        return None
    bound = math.sqrt(6.0 / ((1.0 + a * a) * _fans(tensor)[mode != "fan_in"]))
    return "uniform", (-bound, bound)


def _xavier_normal(tensor: Tensor, gain: float = 1.0, generator: Any = None) -> Value:
    return "normal", (gain * math.sqrt(2.0 / sum(_fans(tensor))),)


_VALUES: dict[str, Callable[..., Value | None]] = {
    "normal_": _normal,
    "trunc_normal_": _truncated,
    "uniform_": _uniform,
    "kaiming_uniform_": _kaiming_uniform,
    "xavier_uniform_": _xavier_uniform,
    "xavier_normal_": _xavier_normal,
    "constant_": lambda tensor, val: ("constant", (float(val),)),
    "ones_": lambda tensor: ("constant", (1.0,)),
    "zeros_": lambda tensor: ("constant", (0.0,)),
}


def initial_values(args: HFArgs, model: Any) -> dict[str, Value]:
    """Return the initial value of each parameter of ``model``, which is on the meta device.

    One that is neither a constant nor a random draw that Titan knows must be loaded.

    Raises:
        UserError: the library cannot compute them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        first, second = _recorded(model, names), _recorded(model, names)
    except Exception as error:  # it computes with values that the config does not check
        why = f"its _init_weights raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise refusal(args, why, "correct model.args.config, or choose another model") from error
    # A table that differs between two runs contains random numbers that nothing has recorded.
    values = {name: value for name, value in first.items() if value is not None and value == second.get(name)}
    return {name: values.get(name, ("loaded", (_UNKNOWN,))) for name in names.values()}


def _recorded(model: Any, names: Mapping[int, str]) -> dict[str, Value | None]:
    """Return the values of the parameters with these ids, in one run of the library's initialization; ``None``: unknown."""
    values: dict[str, Value | None] = {}
    programs = ProgramRecorder()

    def copied(tensor: Tensor, source: Tensor) -> Value | None:
        program = programs.program(source) if source.shape == tensor.shape else None
        return None if program is None else ("computed", (program,))

    def record(value_of: Callable[..., Value | None]) -> Callable[..., Tensor]:
        def fill(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            if (name := names.get(id(tensor))) is not None:
                values[name] = value = value_of(tensor, *arguments, **keywords)
                if value is not None and value[0] == "uniform":
                    programs.uniform(tensor, *map(float, value[1]))
            elif (name := names.get(id(whole_of(tensor)))) is not None:
                values[name] = None  # a part of a parameter has a value of its own
            return tensor

        return fill

    known = {**_VALUES, "copy_": copied}
    recorders = {name: record(known.get(name, _unknown)) for name in library.INITIALIZERS}
    with library.patched_initialization(recorders), programs:
        library.initialize(model)
    return values


def _unknown(tensor: Tensor, *arguments: Any, **keywords: Any) -> None:
    return None
